//! Locations, and backups in a directory.

use std::path::Path;

use super::{Bytes, HOLDER, VOLUME, back_up, removed, request, restored, some_data};
use crate::{Credentials, Failure, Location, Piece, Progress, S3Options, Source, create};

#[test]
fn locations() {
    let directory = |path: &str| Some(Location::Directory(path.to_owned()));
    let s3 = |bucket: &str, prefix: &str| {
        Some(Location::S3 {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
        })
    };
    let table = [
        ("file:///backups", directory("/backups")),
        ("file:///a%20b/c", directory("/a b/c")),
        ("s3://bucket", s3("bucket", "")),
        ("s3://bucket/", s3("bucket", "")),
        ("s3://bucket/a/b/", s3("bucket", "a/b")),
        ("/backups", None),
        ("file://host/backups", None),
        ("s3:///x", None),
        ("s3://key:secret@bucket/x", None),
        ("s3://bucket/x?y", None),
        ("s3://bucket:80/x", None),
        ("s3://bucket/a//b", None),
        ("http://host/x", None),
        ("", None),
    ];
    for (text, expected) in table {
        let found = Location::parse(text);
        if let Err(failure) = &found {
            assert!(!failure.to_string().contains("secret"), "{failure}");
        }
        assert_eq!(found.ok(), expected, "{text}");
    }
}

#[test]
fn credentials_have_no_text() {
    let text = "# mine\n[default]\naws_access_key_id = AKIA1\naws_secret_access_key=geheim=\n\
                [other]\naws_session_token = no\n";
    let credentials = Credentials::parse(text).unwrap();
    assert_eq!(format!("{credentials:?}"), "Credentials");
    let refused = Credentials::parse("aws_access_key_id = AKIA1\nsecret geheim\n");
    let refused = refused.unwrap_err().to_string();
    assert_eq!(refused, "there is no line aws_secret_access_key = …");
    let bucket = Location::parse("s3://bucket/x").unwrap();
    let options = |endpoint: &str| S3Options {
        endpoint: Some(endpoint.to_owned()),
        credentials: Some(credentials.clone()),
        ..S3Options::default()
    };
    super::runtime().block_on(async {
        let refused = bucket.open(&S3Options::default()).unwrap_err();
        assert!(matches!(refused, Failure::Credentials(_)));
        for bad in ["ftp://x", "x", "http://a:b@host", "http://host/?x"] {
            assert!(bucket.open(&options(bad)).is_err(), "{bad}");
        }
        let store = bucket.open(&options("http://127.0.0.1:1")).unwrap();
        let text = format!("{store:?}");
        assert!(!text.contains("geheim"), "{text}");
    });
}

#[test]
fn a_directory_has_backups() {
    super::runtime().block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("file://{}", directory.path().display());
        let location = Location::parse(&url).unwrap();
        let store = location.open(&S3Options::default()).unwrap();
        assert!(store.list(None).await.unwrap().backups.is_empty());
        let mut data = some_data(1);
        back_up(&store, 1, &data).await.unwrap();
        data[0] ^= 1;
        back_up(&store, 2, &data).await.unwrap();
        removed(&store, 1).await.unwrap();
        let store = location.open(&S3Options::default()).unwrap();
        assert_eq!(restored(&store, 2).await.unwrap(), data);
        removed(&store, 2).await.unwrap();
        let left = std::fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(left, 0, "the directory is empty again");

        let missing = Location::parse("file:///does/not/exist").unwrap();
        let refused = missing.open(&S3Options::default()).unwrap_err().to_string();
        assert!(refused.contains("/does/not/exist"), "{refused}");
    });
}

/// A directory that disappears during a backup, as a mount point does, ends it: the files that the
/// client then makes in its place are no backup.
#[test]
fn a_directory_that_disappears_ends_a_backup() {
    struct Moves<'a>(Bytes, &'a Path, &'a Path);
    impl Source for Moves<'_> {
        async fn begin(&mut self) -> Result<u64, String> {
            self.0.begin().await
        }
        async fn next(&mut self) -> Result<Option<Piece>, String> {
            if self.0.next == 1 {
                std::fs::rename(self.1, self.2).unwrap();
            }
            self.0.next().await
        }
    }
    super::runtime().block_on(async {
        let parent = tempfile::tempdir().unwrap();
        let (path, away) = (parent.path().join("mounted"), parent.path().join("away"));
        std::fs::create_dir(&path).unwrap();
        let location = Location::parse(&format!("file://{}", path.display())).unwrap();
        let store = location.open(&S3Options::default()).unwrap();
        let mut data = some_data(1);
        back_up(&store, 1, &data).await.unwrap();
        data[0] ^= 1;
        let mut source = Moves(Bytes::new(&data), &path, &away);
        let ended = create(&store, &request(2), &mut source, &Progress::default()).await;
        assert!(matches!(ended, Err(Failure::Gone(_))), "{ended:?}");
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);

        std::fs::remove_dir(&path).unwrap();
        std::fs::rename(&away, &path).unwrap();
        assert_eq!(store.list(None).await.unwrap().backups.len(), 1);
        back_up(&store, 3, &data).await.unwrap();
        assert_eq!(restored(&store, 3).await.unwrap(), data);
        removed(&store, 1).await.unwrap();
        removed(&store, 3).await.unwrap();
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
    });
}

/// A daemon that is killed leaves unfinished files, which the next backup removes.
#[test]
fn unfinished_files_of_a_killed_daemon_are_removed() {
    super::runtime().block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let location = format!("file://{}", directory.path().display());
        let store = Location::parse(&location).unwrap();
        let store = store.open(&S3Options::default()).unwrap();
        let killed = request(1);
        store.mark(VOLUME, HOLDER, killed.id).await.unwrap();
        let volume = directory.path().join(format!("nacre-backup/{VOLUME}"));
        let objects = volume.join(format!("objects/{}", killed.id));
        std::fs::create_dir_all(&objects).unwrap();
        std::fs::create_dir(volume.join("manifests")).unwrap();
        let manifest = format!("manifests/{}.json#1", killed.id);
        let staged = [objects.join("00000001#1"), volume.join(manifest)];
        for path in &staged {
            std::fs::write(path, "unfinished").unwrap();
        }
        let foreign = volume.join("manifests/a#b");
        std::fs::write(&foreign, "").unwrap();
        back_up(&store, 2, &some_data(1)).await.unwrap();
        assert!(!staged.iter().any(|path| path.exists()));
        assert!(!objects.exists());
        std::fs::remove_file(foreign).unwrap();
        removed(&store, 2).await.unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    });
}
