//! The macros that declare structures of the specification. `wire` declares each field with its
//! offset in the specification; a field at another offset does not compile. `sized` declares a
//! short structure and checks only its size.

macro_rules! wire {
    (
        $(#[$doc:meta])*
        $size:literal bytes: pub struct $name:ident {
            $($(#[$field_doc:meta])* $offset:literal $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, zerocopy::FromBytes, zerocopy::IntoBytes,
            zerocopy::KnownLayout, zerocopy::Immutable, zerocopy::Unaligned,
        )]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        const _: () = {
            assert!(size_of::<$name>() == $size);
            $(assert!(
                core::mem::offset_of!($name, $field) == $offset,
                concat!(stringify!($name), ".", stringify!($field), " is not where it should be"),
            );)*
        };

        impl $name {
            pub const SIZE: usize = $size;

            /// Every byte zero.
            pub fn zeroed() -> $name {
                <$name as zerocopy::FromZeros>::new_zeroed()
            }
        }
    };
}

macro_rules! sized {
    ($(#[$doc:meta])* $size:literal pub struct $name:ident { $($fields:tt)* }) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, zerocopy::FromBytes, zerocopy::IntoBytes,
            zerocopy::KnownLayout, zerocopy::Immutable, zerocopy::Unaligned,
        )]
        #[repr(C)]
        pub struct $name { $($fields)* }

        const _: () = assert!(size_of::<$name>() == $size);

        impl $name {
            pub const SIZE: usize = $size;
        }
    };
}

pub(crate) use {sized, wire};
