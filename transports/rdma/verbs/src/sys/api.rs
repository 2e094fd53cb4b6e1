//! Loads libibverbs and librdmacm at first use and finds their functions by name.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

use super::cm::*;
use super::verbs::*;

/// Names of the libraries as runtime packages install them (without development packages).
pub(crate) const LIBIBVERBS: &str = "libibverbs.so.1";
pub(crate) const LIBRDMACM: &str = "librdmacm.so.1";

/// The error of loading a library or of finding a function in it.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum LoadError {
    #[error("{library} cannot be loaded: {detail}")]
    Library {
        library: &'static str,
        detail: String,
    },
    #[error("{library} has no {symbol}: it is too old or not the one of rdma-core")]
    Symbol {
        library: &'static str,
        symbol: &'static str,
    },
}

impl LoadError {
    pub(crate) fn library(&self) -> &'static str {
        match self {
            Self::Library { library, .. } | Self::Symbol { library, .. } => library,
        }
    }
}

macro_rules! api {
    ($($library:ident { $($name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)* })*) => {
        /// The functions that are called by name; each has a manual page.
        #[derive(Debug)]
        pub(crate) struct Api {
            $($(pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*)*
        }

        impl Api {
            fn load(verbs: &Library, cm: &Library) -> Result<Api, LoadError> {
                let find = Find { verbs, cm };
                Ok(Api {
                    $($($name: {
                        // SAFETY: the type is the function's prototype in the headers of rdma-core
                        // 44, of the symbol's default version; the library is never closed.
                        unsafe { find.symbol($library, concat!(stringify!($name), "\0"))? }
                    },)*)*
                })
            }
        }
    };
}

api! {
    LIBIBVERBS {
        ibv_query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        ibv_query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        _ibv_query_gid_ex: fn(*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int;
        ibv_alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd: fn(*mut ibv_pd) -> c_int;
        ibv_reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        ibv_dereg_mr: fn(*mut ibv_mr) -> c_int;
        ibv_create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
        ibv_destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
        ibv_create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        ibv_resize_cq: fn(*mut ibv_cq, c_int) -> c_int;
        ibv_destroy_cq: fn(*mut ibv_cq) -> c_int;
        ibv_get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events: fn(*mut ibv_cq, u32);
        ibv_create_srq: fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
        ibv_modify_srq: fn(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int;
        ibv_destroy_srq: fn(*mut ibv_srq) -> c_int;
        ibv_modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        ibv_query_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
        ibv_get_async_event: fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        ibv_ack_async_event: fn(*mut ibv_async_event);
    }
    LIBRDMACM {
        rdma_get_devices: fn(*mut c_int) -> *mut *mut ibv_context;
        rdma_free_devices: fn(*mut *mut ibv_context);
        rdma_create_event_channel: fn() -> *mut rdma_event_channel;
        rdma_destroy_event_channel: fn(*mut rdma_event_channel);
        rdma_get_cm_event: fn(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
        rdma_ack_cm_event: fn(*mut rdma_cm_event) -> c_int;
        rdma_create_id: fn(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, c_int) -> c_int;
        rdma_destroy_id: fn(*mut rdma_cm_id) -> c_int;
        rdma_set_option: fn(*mut rdma_cm_id, c_int, c_int, *mut c_void, usize) -> c_int;
        rdma_bind_addr: fn(*mut rdma_cm_id, *mut libc::sockaddr) -> c_int;
        rdma_listen: fn(*mut rdma_cm_id, c_int) -> c_int;
        rdma_resolve_addr: fn(*mut rdma_cm_id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
        rdma_resolve_route: fn(*mut rdma_cm_id, c_int) -> c_int;
        rdma_create_qp: fn(*mut rdma_cm_id, *mut ibv_pd, *mut ibv_qp_init_attr) -> c_int;
        rdma_destroy_qp: fn(*mut rdma_cm_id);
        rdma_init_qp_attr: fn(*mut rdma_cm_id, *mut ibv_qp_attr, *mut c_int) -> c_int;
        rdma_connect: fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        rdma_accept: fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        rdma_reject: fn(*mut rdma_cm_id, *const c_void, u8) -> c_int;
        rdma_disconnect: fn(*mut rdma_cm_id) -> c_int;
    }
}

impl Api {
    /// Opens both libraries, once for the life of the process: they cannot be closed safely. A
    /// failed attempt is repeated at the next call, so that installing a package needs no restart.
    pub(crate) fn open() -> Result<&'static Self, LoadError> {
        static API: OnceLock<Api> = OnceLock::new();
        if let Some(api) = API.get() {
            return Ok(api);
        }
        let verbs = open(LIBIBVERBS)?;
        let cm = open(LIBRDMACM)?;
        let api = Self::load(&verbs, &cm)?;
        std::mem::forget((verbs, cm));
        Ok(API.get_or_init(|| api))
    }
}

fn open(library: &'static str) -> Result<Library, LoadError> {
    // SAFETY: the initialisers of rdma-core's libraries register drivers and read the environment;
    // they require nothing of their caller. A library of this name is as trusted as this program's
    // other libraries.
    unsafe { Library::new(library) }.map_err(|error| LoadError::Library {
        library,
        detail: error.to_string(),
    })
}

struct Find<'a> {
    verbs: &'a Library,
    cm: &'a Library,
}

impl Find<'_> {
    /// # Safety
    /// `F` is the function pointer type of that symbol.
    unsafe fn symbol<F: Copy>(
        &self,
        library: &'static str,
        name: &'static str,
    ) -> Result<F, LoadError> {
        let from = match library {
            LIBIBVERBS => self.verbs,
            _ => self.cm,
        };
        // SAFETY: the caller's promise.
        let found = unsafe { from.get::<F>(name.as_bytes()) };
        found.map(|symbol| *symbol).map_err(|_| LoadError::Symbol {
            library,
            symbol: name.trim_end_matches('\0'),
        })
    }
}
