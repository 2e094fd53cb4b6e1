//! Damaged objects and manifests.

use std::sync::Arc;

use object_store::ObjectStoreExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use uuid::Uuid;

use super::{HOLDER, VOLUME, back_up, files, get, put, removed, request, restored, some_data};
use crate::object::{self, Digest};
use crate::{Damage, Failure, Store, manifest, verify};

async fn one_backup() -> (Arc<InMemory>, Store, Vec<u8>) {
    let inner = Arc::new(InMemory::new());
    let store = Store::new(inner.clone(), Path::default());
    let data = some_data(1);
    back_up(&store, 1, &data).await.unwrap();
    (inner, store, data)
}

fn object(index: u32) -> String {
    let id = request(1).id;
    format!("nacre-backup/{VOLUME}/objects/{id}/{index:08x}")
}

fn manifest_name(number: u128) -> String {
    let id = request(number).id;
    format!("nacre-backup/{VOLUME}/manifests/{id}.json")
}

#[test]
fn objects_are_restored_unchanged() {
    let random = some_data(5)[..100_001].to_vec();
    for data in [
        vec![1],
        vec![0; 4096],
        vec![9; object::OBJECT_BYTES],
        random,
    ] {
        let digest = Digest::of(&data);
        let object = object::encode(&data);
        assert!(object.len() <= data.len() + object::HEADER);
        assert_eq!(object::decode(&object, data.len(), digest).unwrap(), data);
        let other = object::decode(&object, data.len() + 1, digest);
        assert!(matches!(other, Err(Damage::Size { .. })), "{other:?}");
        let text = digest.to_hex();
        assert_eq!(Digest::of_hex(&text), Some(digest));
        assert_eq!(Digest::of_hex(&text.to_uppercase()), None);
        assert_eq!(Digest::of_hex(&text[1..]), None);
    }
}

/// Each change of one byte of an object is found, wherever it is.
#[test]
fn each_changed_byte_of_an_object_is_found() {
    let data: Vec<u8> = (0..700_u32).flat_map(|n| (n / 3).to_le_bytes()).collect();
    let digest = Digest::of(&data);
    let sound = object::encode(&data);
    assert!(sound.len() < data.len());
    for at in 0..sound.len() {
        for bit in [1, 0x80] {
            let mut bad = sound.clone();
            bad[at] ^= bit;
            // Other compressed data can have the same contents.
            if let Ok(found) = object::decode(&bad, data.len(), digest) {
                assert_eq!(found, data);
            }
        }
    }
    for length in 0..sound.len() {
        assert!(object::decode(&sound[..length], data.len(), digest).is_err());
    }
}

/// Restore and verify name the object and its damage.
#[test]
fn a_damaged_object_is_named() {
    super::runtime().block_on(async {
        let (inner, store, _) = one_backup().await;
        let sound = get(&*inner, &object(1)).await;
        let with = |at: usize, byte: u8| {
            let mut bad = sound.clone();
            bad[at] = byte;
            bad
        };
        let last = sound.len() - 1;
        let mut long = sound.clone();
        long.push(0);
        let table = [
            (with(0, b'X'), "it does not begin as one of this kind"),
            (with(4, 9), "its data cannot be decompressed"),
            (with(10, 0x10), "it has 1048576 bytes instead of 4194304"),
            (with(last, sound[last] ^ 1), "its checksum is wrong"),
            (sound[..last].to_vec(), "bytes instead of"),
            (Vec::new(), "it has 0 bytes instead of"),
            (long, "it has more than"),
            (
                get(&*inner, &object(0)).await,
                "its checksum is wrong|more than|instead of",
            ),
        ];
        for (bytes, cause) in table {
            put(&*inner, &object(1), bytes).await;
            let text = restored(&store, 1).await.unwrap_err().to_string();
            let start = format!("{} is damaged: ", object(1));
            assert!(text.starts_with(&start), "{text}");
            assert!(
                cause.split('|').any(|cause| text.contains(cause)),
                "{text}: {cause}"
            );
            let verified = verify(&store, VOLUME, request(1).id, &Default::default()).await;
            let verified = verified.unwrap();
            assert_eq!(verified.damaged.len(), 1);
            assert_eq!(verified.damaged[0].to_string(), text);
        }
        inner.delete(&Path::from(object(1))).await.unwrap();
        let text = restored(&store, 1).await.unwrap_err().to_string();
        assert!(text.ends_with("is damaged: it is missing"), "{text}");
    });
}

/// The next backup writes an object again that is gone or has another size.
#[test]
fn a_backup_does_not_share_a_missing_object() {
    super::runtime().block_on(async {
        let (inner, store, data) = one_backup().await;
        inner.delete(&Path::from(object(0))).await.unwrap();
        put(&*inner, &object(1), vec![0; 50]).await;
        let header = back_up(&store, 2, &data).await.unwrap().header;
        assert!(header.new_bytes > 0 && header.new_bytes < header.stored_bytes);
        assert_eq!(restored(&store, 2).await.unwrap(), data);
    });
}

/// A backup with a bad manifest is listed as such, and is not the base of another one. It keeps the
/// objects of its volume until it is deleted.
#[test]
fn a_damaged_manifest_is_not_used() {
    super::runtime().block_on(async {
        let (inner, store, data) = one_backup().await;
        back_up(&store, 2, &data).await.unwrap();
        let mut bad = get(&*inner, &manifest_name(2)).await;
        let last = bad.len() - 10;
        bad[last] ^= 1;
        put(&*inner, &manifest_name(2), bad).await;
        // Only the first line counts in a list.
        assert_eq!(store.list(None).await.unwrap().backups.len(), 2);
        let ended = restored(&store, 2).await;
        assert!(matches!(ended, Err(Failure::Damaged { .. })), "{ended:?}");
        let created = back_up(&store, 3, &data).await.unwrap();
        assert_eq!(created.header.base, Some(request(1).id));
        assert_eq!(created.bad.len(), 1);
        let before = files(&*inner).await.len();
        let gone = removed(&store, 1).await.unwrap();
        let [left] = &gone.left[..] else {
            panic!("{gone:?}");
        };
        assert!(left.to_string().contains(&manifest_name(2)), "{left}");
        assert_eq!((gone.objects, gone.deferred), (0, false));
        assert_eq!(files(&*inner).await.len(), before - 1);
        // An unfinished backup of this daemon does not keep it from a new one.
        let unfinished = request(7).id;
        store.mark(VOLUME, HOLDER, unfinished).await.unwrap();
        back_up(&store, 4, &data).await.unwrap();
        removed(&store, 4).await.unwrap();
        store.unmark(VOLUME, HOLDER, unfinished).await.unwrap();
        let again = removed(&store, 1).await;
        assert!(matches!(again, Err(Failure::Unknown(_))), "{again:?}");
        assert!(removed(&store, 2).await.unwrap().left.is_empty());
        assert_eq!(restored(&store, 3).await.unwrap(), data);
        removed(&store, 3).await.unwrap();
        assert!(files(&*inner).await.is_empty());
    });
}

/// Each changed byte of a manifest is found.
#[test]
fn each_changed_byte_of_a_manifest_is_found() {
    super::runtime().block_on(async {
        let (inner, ..) = one_backup().await;
        let sound = get(&*inner, &manifest_name(1)).await;
        assert!(manifest::parse(&sound).is_ok());
        for at in 0..sound.len() {
            for bit in [1, 4, 0x80] {
                let mut bad = sound.clone();
                bad[at] ^= bit;
                assert!(manifest::parse(&bad).is_err(), "byte {at}");
            }
            assert!(manifest::parse(&sound[..at]).is_err(), "{at} bytes");
        }
    });
}

/// A manifest with right checksums can still be hostile.
#[test]
fn a_hostile_manifest_is_refused() {
    super::runtime().block_on(async {
        let (inner, ..) = one_backup().await;
        let sound = get(&*inner, &manifest_name(1)).await;
        let text = String::from_utf8(sound).unwrap();
        let (first, list) = text.split_once('\n').unwrap();
        let header = first.split_once("\"backup\":").unwrap().1;
        let header = header.strip_suffix('}').unwrap();
        let old_list = Digest::of(list.as_bytes()).to_hex();
        let make = |header: &str, list: &str| {
            let bytes = format!("\"list_bytes\":{}", text.len() - first.len() - 1);
            let header = header.replace(&bytes, &format!("\"list_bytes\":{}", list.len()));
            let header = header.replace(&old_list, &Digest::of(list.as_bytes()).to_hex());
            let sum = Digest::of(header.as_bytes()).to_hex();
            format!(
                "{{\"format\":\"nacre-backup\",\"version\":1,\"sha256\":\"{sum}\",\"backup\":{header}}}\n{list}"
            )
        };
        assert!(manifest::parse(make(header, list).as_bytes()).is_ok());
        let size = |to: &str| header.replace("\"size_bytes\":10485760", &format!("\"size_bytes\":{to}"));
        let long = "x".repeat(300);
        let headers = [
            (size("0"), "the size of the volume"),
            (
                header.replace("\"created\":17", "\"created\":999917"),
                "its time is impossible",
            ),
            (size("18446744073709551615"), "the size of the volume"),
            (size("1125899906842625"), "the size of the volume"),
            (size("10485761"), "the size of the volume"),
            (size("4194304"), "more objects than the volume"),
            (header.replace("\"objects\":3", "\"objects\":2"), "another number of objects"),
            (header.replace("\"objects\":3", "\"objects\":4294967296"), "more objects"),
            (header.replace("\"object_bytes\":4194304", "\"object_bytes\":1"), "another size"),
            (header.replace("\"v1\"", "\"v\\u0007\""), "control characters"),
            (header.replace("\"v1\"", &format!("\"{long}\"")), "too long"),
            (header.replace("\"base\"", "\"bass\""), "unknown field"),
            (header.replace("\"stored_bytes\":", "\"stored_bytes\":1"), "another total size"),
            (header.replace("\"new_bytes\":", "\"new_bytes\":1"), "more bytes are new"),
        ];
        for (bad, cause) in headers {
            let refused = manifest::parse(make(&bad, list).as_bytes()).unwrap_err();
            assert!(refused.to_string().contains(cause), "{refused}: {cause}");
        }
        let digest = list.split('"').rev().find(|part| part.len() == 64).unwrap();
        let upper = format!("A{}", &digest[1..]);
        let lists = [
            (list.replace("[1,0,", "[2,0,"), "not in order"),
            (list.replace("[2,0,", "[3,0,"), "beyond the end"),
            (list.replace("[2,0,", "[4294967295,0,"), "beyond the end"),
            (list.replace("[2,0,", "[4294967296,0,"), "invalid value"),
            (list.replace("[2,0,", "[-1,0,"), "invalid value"),
            (list.replace("[2,0,", "[2,1,"), "unknown backup"),
            (list.replace("[2,0,", "[2,0,9"), "impossible"),
            (list.replace(digest, &upper), "no digest"),
            (list.replace("]]}", "]],\"more\":1}"), "unknown field"),
            (format!("[{}", "[".repeat(100_000)), "recursion|invalid type"),
        ];
        for (bad, cause) in lists {
            let refused = manifest::parse(make(header, &bad).as_bytes()).unwrap_err();
            let refused = refused.to_string();
            assert!(cause.split('|').any(|c| refused.contains(c)), "{refused}: {cause}");
        }
        let newer = text.replace("\"version\":1", "\"version\":2,\"more\":0");
        let refused = manifest::parse(newer.as_bytes());
        assert_eq!(refused, Err(Damage::Version(2)));
    });
}

/// Files with strange names, and the manifest of another backup.
#[test]
fn strange_files_are_ignored() {
    super::runtime().block_on(async {
        let (inner, store, data) = one_backup().await;
        let upper = request(5).id.to_string().to_uppercase();
        let directory = format!("nacre-backup/{VOLUME}");
        for name in [
            "nacre-backup/readme".to_owned(),
            "nacre-backup/other/manifests/x.json".to_owned(),
            format!("{directory}/manifests/x.json"),
            format!("{directory}/manifests/{}.json.tmp", request(5).id),
            format!("{directory}/manifests/{upper}1.json"),
            format!("{directory}/objects/{}/zz", request(1).id),
            format!("{directory}/objects/{}/1", request(1).id),
            format!("{directory}/objects/{}/00000001/x", request(1).id),
            format!("{directory}/running/x"),
        ] {
            put(&*inner, &name, vec![1]).await;
        }
        let copied = get(&*inner, &manifest_name(1)).await;
        put(&*inner, &manifest_name(7), copied).await;
        let listed = store.list(None).await.unwrap();
        assert_eq!((listed.backups.len(), listed.bad.len()), (1, 1));
        assert_eq!(listed.bad[0].id, request(7).id);
        let cause = listed.bad[0].cause.to_string();
        assert!(cause.contains("the manifest of another backup"), "{cause}");
        assert_eq!(restored(&store, 1).await.unwrap(), data);
        let unknown = store.volume_of(Uuid::from_u128(1)).await;
        assert!(matches!(unknown, Err(Failure::Unknown(_))));
        removed(&store, 7).await.unwrap();
        removed(&store, 1).await.unwrap();
        let left = files(&*inner).await;
        assert_eq!(left.len(), 9, "{left:?}");
    });
}
