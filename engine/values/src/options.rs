//! A macro for options of which an RPC call may set some and leave the others.

/// Declares two structs from one list: the options with their defaults, and the parameters of the
/// RPC method that sets them. An entry of the list has the documentation, the name, the type and
/// the default of an option. Parameters that a call omits are `None`.
#[macro_export]
macro_rules! options {
    (
        $(#[doc = $about:literal])+ $options:ident,
        $(#[doc = $params_about:literal])+ $params:ident:
        $($(#[doc = $words:literal])+ $name:ident: $type:ty = $default:expr;)+
    ) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
        pub struct $options {
            $($(#[doc = $words])+ pub $name: $type,)+
        }

        impl Default for $options {
            fn default() -> Self {
                Self {
                    $($name: $default,)+
                }
            }
        }

        $(#[doc = $params_about])+
        #[derive(
            Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize,
            schemars::JsonSchema,
        )]
        #[serde(default, deny_unknown_fields)]
        pub struct $params {
            $(
                $(#[doc = $words])+
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $name: Option<$type>,
            )+
        }

        impl $params {
            /// Copies each parameter that the call gave to `into`.
            pub fn merge(self, into: &mut $options) {
                $(if let Some(value) = self.$name {
                    into.$name = value;
                })+
            }
        }
    };
}
