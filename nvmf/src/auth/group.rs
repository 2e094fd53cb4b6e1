//! The finite field Diffie-Hellman groups of RFC 7919, and the null group.
//!
//! A prime of `b` bits is `2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1`, and its generator
//! is 2. So all primes share the first digits of e: the table holds these once.

use std::fmt;
use std::sync::OnceLock;

use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd};
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use super::{NoRandom, Random};

/// A Diffie-Hellman group; the value is its identifier in messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Group {
    /// No Diffie-Hellman exchange: responses are computed from the challenge alone.
    Null = 0,
    Ffdhe2048 = 1,
    Ffdhe3072 = 2,
    Ffdhe4096 = 3,
    Ffdhe6144 = 4,
    Ffdhe8192 = 5,
}

impl Group {
    pub const ALL: [Self; 6] = [
        Self::Null,
        Self::Ffdhe2048,
        Self::Ffdhe3072,
        Self::Ffdhe4096,
        Self::Ffdhe6144,
        Self::Ffdhe8192,
    ];

    pub const fn id(self) -> u8 {
        self as u8
    }

    /// `None`: a group of a later specification.
    pub fn from_id(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|group| group.id() == id)
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Ffdhe2048 => "ffdhe2048",
            Self::Ffdhe3072 => "ffdhe3072",
            Self::Ffdhe4096 => "ffdhe4096",
            Self::Ffdhe6144 => "ffdhe6144",
            Self::Ffdhe8192 => "ffdhe8192",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|group| group.name() == name)
    }

    /// Bits of the prime; 0 for the null group.
    const fn bits(self) -> u32 {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 2048,
            Self::Ffdhe3072 => 3072,
            Self::Ffdhe4096 => 4096,
            Self::Ffdhe6144 => 6144,
            Self::Ffdhe8192 => 8192,
        }
    }

    /// Bytes of a public value and of the shared secret: DHVLEN of the messages.
    pub const fn bytes(self) -> usize {
        self.bits() as usize / 8
    }

    /// Bits of a private exponent: the least that RFC 7919 A gives for the group, which is more
    /// than twice the group's strength (5.2).
    const fn exponent_bits(self) -> u32 {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 225,
            Self::Ffdhe3072 => 275,
            Self::Ffdhe4096 => 325,
            Self::Ffdhe6144 => 375,
            Self::Ffdhe8192 => 400,
        }
    }

    /// X of the formula: the smallest number that makes the result a safe prime (RFC 7919 A).
    const fn offset(self) -> u32 {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 560_316,
            Self::Ffdhe3072 => 2_625_351,
            Self::Ffdhe4096 => 5_736_041,
            Self::Ffdhe6144 => 15_705_020,
            Self::Ffdhe8192 => 10_965_728,
        }
    }

    /// The prime, big endian.
    pub(super) fn prime(self) -> Vec<u8> {
        let ones = [0xff; 8];
        let mut middle = E[..self.bytes() - 16].to_vec();
        // Less one: the low 64 bits of `.. * 2^64 - 1` borrow it.
        let mut carry = u64::from(self.offset() - 1);
        for byte in middle.iter_mut().rev() {
            carry += u64::from(*byte);
            *byte = carry as u8;
            carry >>= 8;
        }
        [&ones[..], &middle, &ones].concat()
    }

    /// A private exponent. Its top bit is set, so that all have the same length.
    pub(super) fn exponent(self, random: &mut dyn Random) -> Result<Exponent, NoRandom> {
        let bits = self.exponent_bits() as usize;
        let mut bytes = Zeroizing::new(vec![0; bits.div_ceil(8)]);
        if let Some(last) = bits.checked_sub(1) {
            random.fill(&mut bytes)?;
            let top = 1 << (last % 8);
            bytes[0] = bytes[0] & (top - 1) | top;
        }
        Ok(Exponent(bytes))
    }

    /// The public value of an exponent: 2 to its power. Slow: 0.4 to 7 ms.
    pub(super) fn public(self, exponent: &Exponent) -> Vec<u8> {
        self.power(&[2], exponent).to_vec()
    }

    /// The shared secret, padded to the length of the prime. Slow, as [`Group::public`].
    pub(super) fn shared(self, peer: &[u8], exponent: &Exponent) -> Zeroizing<Vec<u8>> {
        self.power(peer, exponent)
    }

    /// True if another end's public value has the right length and is above 1 and below p - 1:
    /// the other values give a shared secret that every listener knows.
    pub(super) fn has(self, public: &[u8]) -> bool {
        if public.len() != self.bytes() {
            return false;
        }
        let Some((last, others)) = public.split_last() else {
            // The null group has no public value.
            return true;
        };
        let is_small = others.iter().all(|byte| *byte == 0) && *last <= 1;
        let mut below = self.prime();
        // The prime is odd.
        *below.last_mut().expect("a group with a prime") -= 1;
        !is_small && public < &below[..]
    }

    fn power(self, base: &[u8], exponent: &Exponent) -> Zeroizing<Vec<u8>> {
        if self == Self::Null {
            return Zeroizing::new(Vec::new());
        }
        let params = self.params();
        let base = BoxedUint::from_be_slice(base, self.bits()).expect("not longer than the prime");
        let bits = self.exponent_bits();
        let mut power = BoxedUint::from_be_slice(&exponent.0, bits).expect("as many bits");
        let mut result = BoxedMontyForm::new(base, params).pow_bounded_exp(&power, bits);
        power.zeroize();
        let mut value = result.retrieve();
        result.zeroize();
        let bytes = Zeroizing::new(value.to_be_bytes().into_vec());
        value.zeroize();
        bytes
    }

    fn params(self) -> &'static BoxedMontyParams {
        static ALL: [OnceLock<BoxedMontyParams>; 6] = [const { OnceLock::new() }; 6];
        ALL[usize::from(self.id())].get_or_init(|| {
            let prime = BoxedUint::from_be_slice(&self.prime(), self.bits()).expect("its length");
            let odd = Option::<Odd<BoxedUint>>::from(prime.to_odd()).expect("a prime is odd");
            BoxedMontyParams::new_vartime(odd)
        })
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A private exponent, big endian.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub(super) struct Exponent(Zeroizing<Vec<u8>>);

impl fmt::Debug for Exponent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        super::hidden(f, "Exponent", self.0.len())
    }
}

/// The first 8064 bits of e, two before the binary point.
pub(super) const E: [u8; 1008] = hex_literal::hex!(
    "
    adf85458a2bb4a9aafdc5620273d3cf1d8b9c583ce2d3695a9e13641146433fbcc939dce249b3ef9
    7d2fe363630c75d8f681b202aec4617ad3df1ed5d5fd65612433f51f5f066ed0856365553ded1af3
    b557135e7f57c935984f0c70e0e68b77e2a689daf3efe8721df158a136ade73530acca4f483a797a
    bc0ab182b324fb61d108a94bb2c8e3fbb96adab760d7f4681d4f42a3de394df4ae56ede76372bb19
    0b07a7c8ee0a6d709e02fce1cdf7e2ecc03404cd28342f619172fe9ce98583ff8e4f1232eef28183
    c3fe3b1b4c6fad733bb5fcbc2ec22005c58ef1837d1683b2c6f34a26c1b2effa886b4238611fcfdc
    de355b3b6519035bbc34f4def99c023861b46fc9d6e6c9077ad91d2691f7f7ee598cb0fac186d91c
    aefe130985139270b4130c93bc437944f4fd4452e2d74dd364f2e21e71f54bff5cae82ab9c9df69e
    e86d2bc522363a0dabc521979b0deada1dbf9a42d5c4484e0abcd06bfa53ddef3c1b20ee3fd59d7c
    25e41d2b669e1ef16e6f52c3164df4fb7930e9e4e58857b6ac7d5f42d69f6d187763cf1d55034004
    87f55ba57e31cc7a7135c886efb4318aed6a1e012d9e6832a907600a918130c46dc778f971ad0038
    092999a333cb8b7a1a1db93d7140003c2a4ecea9f98d0acc0a8291cdcec97dcf8ec9b55a7f88a46b
    4db5a851f44182e1c68a007e5e0dd9020bfd64b645036c7a4e677d2c38532a3a23ba4442caf53ea6
    3bb454329b7624c8917bdd64b1c0fd4cb38e8c334c701c3acdad0657fccfec719b1f5c3e4e46041f
    388147fb4cfdb477a52471f7a9a96910b855322edb6340d8a00ef092350511e30abec1fff9e3a26e
    7fb29f8c183023c3587e38da0077d9b4763e4e4b94b2bbc194c6651e77caf992eeaac0232a281bf6
    b3a739c1226116820ae8db5847a67cbef9c9091b462d538cd72b03746ae77f5e62292c311562a846
    505dc82db854338ae49f5235c95b91178ccf2dd5cacef403ec9d1810c6272b045b3b71f9dc6b80d6
    3fdd4a8e9adb1e6962a69526d43161c1a41d570d7938dad4a40e329ccff46aaa36ad004cf600c838
    1e425a31d951ae64fdb23fcec9509d43687feb69edd1cc5e0b8cc3bdf64b10ef86b63142a3ab8829
    555b2f747c932665cb2c0f1cc01bd70229388839d2af05e454504ac78b7582822846c0ba35c35f5c
    59160cc046fd8251541fc68c9c86b022bb7099876a460e7451a8a93109703fee1c217e6c3826e52c
    51aa691e0e423cfc99e9e31650c1217b624816cdad9a95f9d5b8019488d9c0a0a1fe3075a577e231
    83f81d4a3f2fa4571efc8ce0ba8a4fe8b6855dfe72b0a66eded2fbabfbe58a30fafabe1c5d71a87e
    2f741ef8c1fe86fea6bbfde530677f0d97d11d49f7a8443d0822e506a9f4614e011e2a94838ff88c
    d68c8bb7c51eef6d
    "
);
