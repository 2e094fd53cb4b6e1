//! Options that a call sets in part.

/// Declares options with their defaults, and the parameters of the method that sets them, from one
/// list. An entry has the words, the name, the type and the default of an option. Parameters that a
/// call leaves out are `None`.
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
            /// Sets those of `into` that the call gave.
            pub fn merge(self, into: &mut $options) {
                $(if let Some(value) = self.$name {
                    into.$name = value;
                })+
            }
        }
    };
}
