//! The body of the fuzz target `address`; an ordinary test replays its corpus.

use super::{AddressError, Endpoint, Grammar};

/// An accepted text is written back in a form that means the same; a refusal has words.
pub fn address(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else {
        return;
    };
    let any = text.parse::<Endpoint>();
    match &any {
        Ok(endpoint) => {
            let written = endpoint.to_string();
            assert_eq!(written.parse::<Endpoint>().as_ref(), Ok(endpoint), "{text}");
            let fields = endpoint.spdk_fields();
            assert!(!fields.traddr.is_empty() && !fields.traddr.contains(['[', '/', '?']));
        }
        Err(refused) => assert!(!refused.to_string().is_empty()),
    }
    // Each use accepts a part of the whole, with the same meaning.
    for grammar in [
        Grammar::CONTROLLER,
        Grammar::NAMESPACE,
        Grammar::LISTENER,
        Grammar::DRIVE,
    ] {
        match grammar.parse(text) {
            Ok(endpoint) => assert_eq!(Ok(&endpoint), any.as_ref(), "{text}"),
            Err(AddressError::Form { form, .. }) => assert_eq!(form, grammar.form),
            Err(_) => {}
        }
    }
}
