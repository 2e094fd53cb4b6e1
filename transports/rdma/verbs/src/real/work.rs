//! Converts work requests and completions between this crate's types and the C structs of verbs.
//! [`super::queue`] uses it for each post and poll.

use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::ptr::null_mut;

use crate::sys::verbs::*;
use crate::types::{PostError, RecvWr, SendOp, SendWr, Sge, WcOpcode, WcStatus, WorkCompletion};

/// Most requests per call of the driver, so that the chain fits on the stack. A longer batch needs
/// one call, and one doorbell, per `CHAIN` requests.
const CHAIN: usize = 32;

/// Most completions per call of `ibv_poll_cq`.
pub(super) const POLL: usize = 32;

// `Sge` slices are passed to the driver unchanged, so both layouts must agree.
const _: () = {
    assert!(size_of::<Sge>() == size_of::<ibv_sge>() && align_of::<Sge>() == align_of::<ibv_sge>());
    assert!(offset_of!(Sge, address) == offset_of!(ibv_sge, addr));
    assert!(offset_of!(Sge, length) == offset_of!(ibv_sge, length));
    assert!(offset_of!(Sge, lkey) == offset_of!(ibv_sge, lkey));
};

/// Links the requests to chains of at most [`CHAIN`] and passes each to `post`, the driver's
/// `ibv_post_send`. `post` returns the verb's result, and on an error sets its second argument to
/// the first request that was not accepted.
///
/// # Safety
///
/// `post` reads the chain and its entries during the call only, and sets `bad` to null or to a
/// request of the chain.
#[inline]
pub(super) unsafe fn post_send(
    requests: &[SendWr],
    sges: &[Sge],
    mut post: impl FnMut(*mut ibv_send_wr, *mut *mut ibv_send_wr) -> i32,
) -> Result<(), PostError> {
    let mut chain = [const { MaybeUninit::<ibv_send_wr>::uninit() }; CHAIN];
    let first = chain.as_mut_ptr().cast::<ibv_send_wr>();
    for (batch, requests) in requests.chunks(CHAIN).enumerate() {
        let last = requests.len() - 1;
        for (index, request) in requests.iter().enumerate() {
            let (opcode, ex, rdma) = opcode(request.op);
            let flag = |set: bool, flag: u32| if set { flag } else { 0 };
            let wr = ibv_send_wr {
                wr_id: request.wr_id,
                next: if index < last {
                    first.wrapping_add(index + 1)
                } else {
                    null_mut()
                },
                sg_list: entries(sges, request.first_sge, request.sges),
                num_sge: request.sges as i32,
                opcode,
                send_flags: flag(request.signaled, IBV_SEND_SIGNALED)
                    | flag(request.inline, IBV_SEND_INLINE)
                    | flag(request.fence, IBV_SEND_FENCE),
                ex,
                wr: ibv_wr_union { rdma },
                remote_srqn: 0,
                tail: ibv_wr_tail::UNUSED,
            };
            chain[index].write(wr);
        }
        let mut bad = null_mut();
        let result = post(first, &mut bad);
        if result != 0 {
            let accepted = accepted(first.addr(), bad.addr(), size_of::<ibv_send_wr>());
            return Err(refused(batch * CHAIN + accepted, result));
        }
    }
    Ok(())
}

/// Like [`post_send`], for receive requests.
///
/// # Safety
/// As [`post_send`].
#[inline]
pub(super) unsafe fn post_recv(
    requests: &[RecvWr],
    sges: &[Sge],
    mut post: impl FnMut(*mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> i32,
) -> Result<(), PostError> {
    let mut chain = [const { MaybeUninit::<ibv_recv_wr>::uninit() }; CHAIN];
    let first = chain.as_mut_ptr().cast::<ibv_recv_wr>();
    for (batch, requests) in requests.chunks(CHAIN).enumerate() {
        let last = requests.len() - 1;
        for (index, request) in requests.iter().enumerate() {
            chain[index].write(ibv_recv_wr {
                wr_id: request.wr_id,
                next: if index < last {
                    first.wrapping_add(index + 1)
                } else {
                    null_mut()
                },
                sg_list: entries(sges, request.first_sge, request.sges),
                num_sge: request.sges as i32,
            });
        }
        let mut bad = null_mut();
        let result = post(first, &mut bad);
        if result != 0 {
            let accepted = accepted(first.addr(), bad.addr(), size_of::<ibv_recv_wr>());
            return Err(refused(batch * CHAIN + accepted, result));
        }
    }
    Ok(())
}

/// The entries of one request. Verbs declare them mutable, but only read them.
fn entries(sges: &[Sge], first: u32, count: u32) -> *mut ibv_sge {
    let first = first as usize;
    sges[first..first + count as usize]
        .as_ptr()
        .cast_mut()
        .cast()
}

fn opcode(op: SendOp) -> (i32, u32, ibv_wr_rdma) {
    let none = ibv_wr_rdma {
        remote_addr: 0,
        rkey: 0,
    };
    let at = |remote_addr, rkey| ibv_wr_rdma { remote_addr, rkey };
    match op {
        SendOp::Send => (IBV_WR_SEND, 0, none),
        SendOp::SendWithInvalidate { rkey } => (IBV_WR_SEND_WITH_INV, rkey, none),
        SendOp::Write { address, rkey } => (IBV_WR_RDMA_WRITE, 0, at(address, rkey)),
        SendOp::Read { address, rkey } => (IBV_WR_RDMA_READ, 0, at(address, rkey)),
    }
}

/// Number of accepted requests in a chain: those before the address `bad`. A driver that leaves
/// `bad` null accepted none.
fn accepted(first: usize, bad: usize, size: usize) -> usize {
    bad.checked_sub(first)
        .map_or(0, |bytes| bytes / size)
        .min(CHAIN)
}

fn refused(posted: usize, result: i32) -> PostError {
    PostError {
        posted,
        source: io::Error::from_raw_os_error(result.saturating_abs()),
    }
}

/// Converts one polled completion.
#[inline]
pub(super) fn completion(wc: &ibv_wc) -> WorkCompletion {
    WorkCompletion {
        wr_id: wc.wr_id,
        status: WcStatus::from_raw(wc.status as u32),
        opcode: match wc.opcode {
            IBV_WC_SEND => WcOpcode::Send,
            IBV_WC_RDMA_WRITE => WcOpcode::Write,
            IBV_WC_RDMA_READ => WcOpcode::Read,
            IBV_WC_RECV => WcOpcode::Recv,
            other => WcOpcode::Other(other as u32),
        },
        byte_len: wc.byte_len,
        qp: wc.qp_num,
        vendor_error: wc.vendor_err,
        invalidated: (wc.wc_flags & IBV_WC_WITH_INV != 0).then_some(wc.ex),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(wr_id: u64, op: SendOp, first_sge: u32, sges: u32) -> SendWr {
        SendWr {
            wr_id,
            op,
            first_sge,
            sges,
            signaled: wr_id % 2 == 1,
            inline: op == SendOp::Send,
            fence: false,
        }
    }

    /// Walks a chain as a driver does.
    ///
    /// # Safety
    /// `at` is a chain as `post_send` makes it, with one entry per request.
    unsafe fn walk(mut at: *mut ibv_send_wr) -> Vec<(u64, i32, u32, u32, u64, u32)> {
        let mut seen = Vec::new();
        while !at.is_null() {
            // SAFETY: the caller's promise.
            let (wr, length, rdma) = unsafe { (&*at, (*(*at).sg_list).length, (*at).wr.rdma) };
            seen.push((
                wr.wr_id,
                wr.opcode,
                wr.send_flags,
                wr.ex,
                rdma.remote_addr + u64::from(rdma.rkey),
                length,
            ));
            at = wr.next;
        }
        seen
    }

    /// Goal: a batch becomes one chain in the same order, with all fields. Method: one request of
    /// each kind; walk the chain as a driver does.
    #[test]
    fn a_batch_is_a_chain() {
        let sge = |length| Sge {
            address: 64,
            length,
            lkey: 9,
        };
        let sges = [sge(10), sge(11), sge(12), sge(13)];
        let write = SendOp::Write {
            address: 1 << 32,
            rkey: 5,
        };
        let read = SendOp::Read {
            address: 2 << 32,
            rkey: 6,
        };
        let requests = [
            send(0, write, 3, 1),
            send(1, read, 2, 1),
            send(2, SendOp::SendWithInvalidate { rkey: 77 }, 1, 1),
            send(3, SendOp::Send, 0, 1),
        ];
        let mut chains = Vec::new();
        // SAFETY: the chain is walked during the call; each request has an entry.
        unsafe {
            post_send(&requests, &sges, |first, _| {
                chains.push(walk(first));
                0
            })
            .unwrap();
        }
        let expected = [
            (0, IBV_WR_RDMA_WRITE, 0, 0, (1 << 32) + 5, 13),
            (1, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, 0, (2 << 32) + 6, 12),
            (2, IBV_WR_SEND_WITH_INV, 0, 77, 0, 11),
            (
                3,
                IBV_WR_SEND,
                IBV_SEND_SIGNALED | IBV_SEND_INLINE,
                0,
                0,
                10,
            ),
        ];
        assert_eq!(chains, [expected]);
    }

    /// Goal: the number of accepted requests of a batch is known. Method: a driver that refuses the
    /// fourth of the second chain, one that refuses the first, and one that names none.
    #[test]
    fn accepted_requests_are_counted() {
        let sges = [Sge {
            address: 0,
            length: 1,
            lkey: 0,
        }];
        let requests: Vec<_> = (0..2 * CHAIN as u64)
            .map(|id| RecvWr {
                wr_id: id,
                first_sge: 0,
                sges: 1,
            })
            .collect();
        let mut calls = 0;
        // SAFETY: `bad` is set to a request of the chain.
        let error = unsafe {
            post_recv(&requests, &sges, |first, bad| {
                calls += 1;
                if calls == 1 {
                    return 0;
                }
                *bad = first.add(3);
                libc::ENOMEM
            })
        }
        .unwrap_err();
        assert_eq!(error.posted, CHAIN + 3);
        assert_eq!(error.source.raw_os_error(), Some(libc::ENOMEM));
        for names_one in [true, false] {
            // SAFETY: as above, or null.
            let error = unsafe {
                post_recv(&requests, &sges, |first, bad| {
                    *bad = if names_one { first } else { null_mut() };
                    -libc::EINVAL
                })
            }
            .unwrap_err();
            assert_eq!(error.posted, 0);
            assert_eq!(error.source.raw_os_error(), Some(libc::EINVAL));
        }
    }

    /// Goal: every field of a completion is converted.
    #[test]
    fn completions_are_translated() {
        let wc = ibv_wc {
            wr_id: 7,
            status: 12,
            opcode: IBV_WC_RECV,
            vendor_err: 0x81,
            byte_len: 64,
            ex: 99,
            qp_num: 17,
            wc_flags: IBV_WC_WITH_INV,
            ..Default::default()
        };
        let done = completion(&wc);
        assert_eq!(done.status.name(), "IBV_WC_RETRY_EXC_ERR");
        assert_eq!((done.opcode, done.invalidated), (WcOpcode::Recv, Some(99)));
        assert_eq!((done.wr_id, done.qp, done.vendor_error), (7, 17, 0x81));
        let without = completion(&ibv_wc { wc_flags: 0, ..wc });
        assert_eq!(without.invalidated, None);
        let unknown = ibv_wc { status: 9999, ..wc };
        assert_eq!(completion(&unknown).status, WcStatus::GeneralError);
    }
}
