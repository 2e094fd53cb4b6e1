use super::*;

fn config(block_size: u32) -> Config {
    Config {
        name: "Malloc0".into(),
        block_size,
        num_blocks: 2048,
        physical_block_size: None,
        uuid: None,
        optimal_io_boundary: None,
        numa_id: None,
    }
}

#[test]
fn conforms() {
    for block_size in [512, 4096] {
        crate::conformance::run(|| create(config(block_size)).expect("a good configuration"));
    }
}

/// The layer splits at the boundary, unseen by the user.
#[test]
fn conforms_with_a_boundary() {
    let config = Config {
        optimal_io_boundary: Some(7),
        ..config(512)
    };
    crate::conformance::run(|| create(config.clone()).expect("a good configuration"));
}

/// A device that does not fit the machine is a named error with the numbers, not a crash.
#[test]
fn too_large() {
    let config = Config {
        num_blocks: 1 << 50,
        ..config(512)
    };
    let error = create(config).err().expect("half an exabyte of memory");
    assert!(
        matches!(error, ConfigError::Memory { bytes, .. } if bytes == 1 << 59),
        "{error}"
    );
}
