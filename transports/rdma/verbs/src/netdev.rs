//! Network queries that need unsafe system calls: a driver's own statistics (`ethtool -S`), LLDP
//! frames, and datagrams with the DSCP of their arrival.
//!
//! None belongs to verbs. They are in this crate because it has the only unsafe code of the RDMA
//! crates. The parser of LLDP frames is in `nacre-transport-rdma-link`, which has none.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nacre_transport_rdma_link::lldp;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, netdevice, recv, socket_with,
};

// Requests of linux/ethtool.h and linux/sockios.h.
const SIOCETHTOOL: libc::c_ulong = 0x8946;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSTATS: u32 = 0x1d;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETH_SS_STATS: u32 = 1;
const ETH_GSTRING_LEN: usize = 32;

/// A ConnectX has about a thousand statistics; a driver that reports more than this limit is not
/// read.
const STATISTICS_MAX: usize = 1 << 16;
/// Space beyond the reported number: the kernel writes as many values as the driver has at the time
/// of the call, and a change of channels adds some.
const STATISTICS_MARGIN: usize = 4096;

/// The statistics of one interface's driver. Their names are read once, and again when their number
/// changes, because the kernel holds a global lock for each call.
#[derive(Debug)]
pub struct Statistics {
    interface: String,
    socket: OwnedFd,
    names: Vec<String>,
}

impl Statistics {
    /// Opens a socket and reads the names. Fails with EOPNOTSUPP if the driver has no statistics.
    pub fn open(interface: &str) -> io::Result<Self> {
        let socket = socket_with(
            AddressFamily::INET,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let mut statistics = Self {
            interface: interface.to_owned(),
            socket,
            names: Vec::new(),
        };
        statistics.names = statistics.read_names()?;
        Ok(statistics)
    }

    /// Names and values, in the driver's order. Fails with `Interrupted` if the driver changes its
    /// statistics again and again meanwhile.
    pub fn read(&mut self) -> io::Result<Vec<(String, u64)>> {
        // Try twice, because the set may change between the two requests.
        for _ in 0..2 {
            let values = self.read_values()?;
            if values.len() == self.names.len() {
                return Ok(self.names.iter().cloned().zip(values).collect());
            }
            self.names = self.read_names()?;
        }
        Err(io::ErrorKind::Interrupted.into())
    }

    fn count(&self) -> io::Result<usize> {
        // The command, a reserved word, the mask of sets, the number.
        let mut buffer = [
            u64::from_ne_bytes(pair(ETHTOOL_GSSET_INFO, 0)),
            1 << ETH_SS_STATS,
            0,
        ];
        self.ioctl(&mut buffer)?;
        let count = match buffer[1] {
            0 => 0,
            _ => low(buffer[2]) as usize,
        };
        match count {
            0 => Err(rustix::io::Errno::OPNOTSUPP.into()),
            count if count > STATISTICS_MAX => Err(io::ErrorKind::InvalidData.into()),
            count => Ok(count),
        }
    }

    fn read_names(&self) -> io::Result<Vec<String>> {
        let count = self.count()?;
        const WORDS: usize = ETH_GSTRING_LEN / 8;
        // The command, the set, the length, and then the names from byte 12 on.
        let mut buffer = vec![0u64; 2 + (count + STATISTICS_MARGIN) * WORDS];
        buffer[0] = u64::from_ne_bytes(pair(ETHTOOL_GSTRINGS, ETH_SS_STATS));
        buffer[1] = u64::from_ne_bytes(pair(count as u32, 0));
        self.ioctl(&mut buffer)?;
        let count = (low(buffer[1]) as usize).min(count);
        let bytes: Vec<u8> = buffer.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let names = bytes[12..].chunks_exact(ETH_GSTRING_LEN).take(count);
        Ok(names
            .map(|name| {
                let end = name.iter().position(|byte| *byte == 0);
                String::from_utf8_lossy(&name[..end.unwrap_or(name.len())])
                    .trim()
                    .to_owned()
            })
            .collect())
    }

    fn read_values(&self) -> io::Result<Vec<u64>> {
        let count = self.names.len();
        let mut buffer = vec![0u64; 1 + count + STATISTICS_MARGIN];
        buffer[0] = u64::from_ne_bytes(pair(ETHTOOL_GSTATS, count as u32));
        self.ioctl(&mut buffer)?;
        let [_, _, _, _, count @ ..] = buffer[0].to_ne_bytes();
        let count = u32::from_ne_bytes(count) as usize;
        Ok(buffer[1..].iter().copied().take(count).collect())
    }

    /// Executes an ethtool command; `buffer` contains it and has space for the reply.
    fn ioctl(&self, buffer: &mut [u64]) -> io::Result<()> {
        // SAFETY: all zeroes is a valid ifreq: an empty name, and null in each member of the union.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        set_name(&mut request.ifr_name, &self.interface)?;
        request.ifr_ifru.ifru_data = buffer.as_mut_ptr().cast();
        // SAFETY: the socket is open, and the kernel reads and writes `buffer` only until the call
        // returns. The callers make it as long as their command's answer, with
        // `STATISTICS_MARGIN` for a driver whose set grows meanwhile. A safe wrapper exists
        // nowhere.
        let code =
            unsafe { libc::ioctl(self.socket.as_raw_fd(), SIOCETHTOOL as _, &raw mut request) };
        match code {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

fn pair(first: u32, second: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&first.to_ne_bytes());
    bytes[4..].copy_from_slice(&second.to_ne_bytes());
    bytes
}

/// The first four bytes of a word in memory.
fn low(word: u64) -> u32 {
    let [a, b, c, d, ..] = word.to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d])
}

/// Copies an interface name. Fails for a name that is too long instead of truncating it.
fn set_name(to: &mut [libc::c_char], name: &str) -> io::Result<()> {
    if name.is_empty() || name.len() >= to.len() {
        return Err(rustix::io::Errno::NODEV.into());
    }
    for (to, byte) in to.iter_mut().zip(name.bytes()) {
        *to = byte as libc::c_char;
    }
    Ok(())
}

/// Receives LLDP frames of one interface, without affecting other listeners.
#[derive(Debug)]
pub struct LldpSocket {
    socket: OwnedFd,
}

impl LldpSocket {
    /// Starts to receive the interface's LLDP frames. Needs CAP_NET_RAW.
    pub fn open(interface: &str) -> io::Result<Self> {
        // A socket without a protocol receives nothing until it is bound.
        let socket = socket_with(
            AddressFamily::PACKET,
            SocketType::RAW,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None::<Protocol>,
        )?;
        let index = netdevice::name_to_index(&socket, interface)?;
        let index = i32::try_from(index).map_err(|_| rustix::io::Errno::NODEV)?;
        join(&socket, index)?;
        bind(&socket, index)?;
        Ok(Self { socket })
    }

    /// Receives frames for the time `wait`; ends early after `enough` frames. Frames start with the
    /// Ethernet header.
    pub fn receive(&self, wait: Duration, enough: usize) -> io::Result<Vec<Vec<u8>>> {
        let deadline = Instant::now() + wait;
        let mut frames = Vec::new();
        // A frame is at most 1,536 bytes; longer ones are cut off and then refused.
        let mut buffer = [0; 2048];
        while frames.len() < enough {
            match recv(&self.socket, &mut buffer, RecvFlags::empty()) {
                Ok((length, _)) => frames.push(buffer[..length].to_vec()),
                Err(rustix::io::Errno::AGAIN) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break;
                    }
                    let mut ready = [PollFd::new(&self.socket, PollFlags::IN)];
                    let left = left.try_into().map_err(|_| rustix::io::Errno::INVAL)?;
                    match poll(&mut ready, Some(&left)) {
                        Ok(_) | Err(rustix::io::Errno::INTR) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(frames)
    }
}

impl AsFd for LldpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn bind(socket: &OwnedFd, index: i32) -> io::Result<()> {
    // SAFETY: all zeroes is a valid sockaddr_ll.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = lldp::ETHERTYPE.to_be();
    address.sll_ifindex = index;
    let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the pointer is to a whole sockaddr_ll, which the kernel only reads. rustix has no
    // address of this family.
    let code = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
    match code {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Makes the interface accept frames to LLDP's group address, while the socket is open.
fn join(socket: &OwnedFd, index: i32) -> io::Result<()> {
    let mut group = libc::packet_mreq {
        mr_ifindex: index,
        mr_type: libc::PACKET_MR_MULTICAST as u16,
        mr_alen: lldp::GROUP.len() as u16,
        mr_address: [0; 8],
    };
    group.mr_address[..lldp::GROUP.len()].copy_from_slice(&lldp::GROUP);
    let length = size_of::<libc::packet_mreq>() as libc::socklen_t;
    // SAFETY: the pointer is to a whole packet_mreq, which the kernel only reads. rustix has no
    // options of packet sockets.
    let code = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_ADD_MEMBERSHIP,
            (&raw const group).cast(),
            length,
        )
    };
    match code {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Receives a datagram and its Type of Service byte (IPv6: Traffic Class), which is DSCP << 2. The
/// socket must be set to IP_RECVTOS or IPV6_RECVTCLASS; without it the byte is `None`. A longer
/// datagram is cut off at the buffer's end.
pub fn receive_with_tos(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
) -> io::Result<(usize, Option<u8>)> {
    // Words, because the kernel aligns control messages to them.
    let mut control = [0u64; 16];
    let mut data = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    // SAFETY: all zeroes is a valid msghdr: no address, no buffers, no control messages.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut data;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: the socket is open; the kernel writes at most `iov_len` bytes to `buffer` and
    // `msg_controllen` bytes to `control`, only until the call returns. rustix does not parse this
    // kind of control message.
    let length = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) };
    let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
    let control: Vec<u8> = control.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let used = (message.msg_controllen as usize).min(control.len());
    Ok((length, tos_in(&control[..used])))
}

/// The Type of Service byte in a sequence of control messages: `struct cmsghdr` (a length that
/// counts itself, level, type), then the value.
fn tos_in(mut control: &[u8]) -> Option<u8> {
    const WORD: usize = size_of::<usize>();
    const HEADER: usize = WORD + 8;
    while let Some(header) = control.get(..HEADER) {
        let length = usize::from_ne_bytes(header[..WORD].try_into().ok()?);
        let int = |at: usize| Some(i32::from_ne_bytes(header.get(at..at + 4)?.try_into().ok()?));
        let value = control.get(HEADER..length)?;
        match (int(WORD)?, int(WORD + 4)?) {
            (libc::IPPROTO_IP, libc::IP_TOS) => return value.first().copied(),
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                let class = i32::from_ne_bytes(value.get(..4)?.try_into().ok()?);
                return u8::try_from(class).ok();
            }
            _ => control = control.get(length.next_multiple_of(WORD)..)?,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the statistics of this machine's interfaces have as many names as values.
    #[test]
    fn names_and_values_belong_together() {
        let mut read = 0;
        for entry in std::fs::read_dir("/sys/class/net").into_iter().flatten() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let Ok(mut statistics) = Statistics::open(&name) else {
                continue;
            };
            let all = statistics.read().unwrap();
            assert!(!all.is_empty());
            assert!(all.iter().all(|(name, _)| !name.is_empty()), "{all:?}");
            read += 1;
        }
        if read == 0 {
            eprintln!("SKIPPED: names_and_values_belong_together: no driver here has statistics");
        }
    }

    #[test]
    fn an_interface_without_statistics_is_an_error() {
        assert!(Statistics::open("lo").is_err());
        let none = Statistics::open("none-such").unwrap_err();
        assert_eq!(none.raw_os_error(), Some(libc::ENODEV));
        let long = Statistics::open("a-name-that-is-too-long").unwrap_err();
        assert_eq!(long.raw_os_error(), Some(libc::ENODEV));
    }

    #[test]
    fn receiving_without_frames_times_out() {
        let socket = match LldpSocket::open("lo") {
            Ok(socket) => socket,
            Err(error) => return eprintln!("SKIPPED: receiving_without_frames_times_out: {error}"),
        };
        let start = Instant::now();
        let frames = socket.receive(Duration::from_millis(20), 1).unwrap();
        assert!(frames.is_empty());
        assert!(start.elapsed() >= Duration::from_millis(20));
        assert!(LldpSocket::open("none-such").is_err());
    }

    /// Goal: the mark of a datagram is reported as the sender set it. Method: over the loopback,
    /// both versions.
    #[test]
    fn datagrams_arrive_with_their_mark() {
        use rustix::net::sockopt;
        for (at, is_ipv4) in [("127.0.0.1:0", true), ("[::1]:0", false)] {
            let Ok(receiver) = std::net::UdpSocket::bind(at) else {
                eprintln!("SKIPPED: datagrams_arrive_with_their_mark: {at}");
                continue;
            };
            let sender = std::net::UdpSocket::bind(at).unwrap();
            let to = receiver.local_addr().unwrap();
            let mut buffer = [0; 8];
            sender.send_to(b"first", to).unwrap();
            let first = receive_with_tos(receiver.as_fd(), &mut buffer).unwrap();
            assert_eq!(first, (5, None));
            for tos in [0, 104, 0xb8] {
                if is_ipv4 {
                    sockopt::set_ip_recvtos(&receiver, true).unwrap();
                    sockopt::set_ip_tos(&sender, tos).unwrap();
                } else {
                    sockopt::set_ipv6_recvtclass(&receiver, true).unwrap();
                    sockopt::set_ipv6_tclass(&sender, tos.into()).unwrap();
                }
                sender.send_to(b"a longer text", to).unwrap();
                let next = receive_with_tos(receiver.as_fd(), &mut buffer).unwrap();
                assert_eq!(next, (8, Some(tos)));
                assert_eq!(&buffer, b"a longer");
            }
            receiver.set_nonblocking(true).unwrap();
            let none = receive_with_tos(receiver.as_fd(), &mut buffer).unwrap_err();
            assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
        }
    }

    #[test]
    fn control_messages() {
        let message = |level: i32, kind: i32, value: &[u8]| {
            let mut bytes = (16 + value.len()).to_ne_bytes().to_vec();
            bytes.extend(level.to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend(value);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
            bytes
        };
        let v4 = message(libc::IPPROTO_IP, libc::IP_TOS, &[104]);
        let v6 = message(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &104i32.to_ne_bytes());
        let other = message(libc::SOL_SOCKET, libc::SCM_TIMESTAMP, &[7; 16]);
        assert_eq!(tos_in(&v4), Some(104));
        assert_eq!(tos_in(&[other.clone(), v6].concat()), Some(104));
        assert_eq!(tos_in(&other), None);
        for cut in 0..v4.len() - 7 {
            assert_eq!(tos_in(&v4[..cut]), None, "{cut}");
        }
        // A length of 0 must not loop.
        assert_eq!(tos_in(&[0; 64]), None);
    }
}
