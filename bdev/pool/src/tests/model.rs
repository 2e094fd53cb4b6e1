//! Random operations on volumes, snapshots and clones, with deaths of the keeper in between: every
//! version has the contents that a model in memory has.

use std::collections::BTreeMap;

use nacre_bdev::{Registry, Status};
use nacre_random::Random;
use uuid::Uuid;

use super::external;
use super::rig::{self, Home, Host, run};
use crate::{BLOCK, Command, PoolHandle};

const BLOCKS: u64 = 1024;

struct Model {
    /// The byte of each block, by version.
    versions: BTreeMap<Uuid, Vec<u8>>,
    volumes: Vec<Uuid>,
    next: u128,
}

fn verify(pool: &PoolHandle, model: &Model, seed: u64) {
    for (id, bytes) in &model.versions {
        let mut host = Host::on(pool, *id);
        for lba in (0..BLOCKS).step_by(64) {
            let (status, read) = host.read(lba, 64);
            assert_eq!(status, Status::Ok);
            for (at, block) in read.chunks(BLOCK as usize).enumerate() {
                let expected = bytes[lba as usize + at];
                let lba = lba as usize + at;
                assert!(
                    block.iter().all(|byte| *byte == expected),
                    "seed {seed}: block {lba} of {id} has {}, not {expected}",
                    block[0]
                );
            }
        }
    }
}

fn one_life(pool: &PoolHandle, model: &mut Model, random: &mut Random, seed: u64) {
    let mut hosts: BTreeMap<Uuid, Host> = BTreeMap::new();
    for _ in 0..120 {
        let volume = model.volumes[random.below(model.volumes.len() as u64) as usize];
        let host = hosts
            .entry(volume)
            .or_insert_with(|| Host::on(pool, volume));
        let lba = random.below(BLOCKS - 50);
        let blocks = 1 + random.below(49) as u32;
        let range = lba as usize..lba as usize + blocks as usize;
        match random.below(100) {
            0..60 => {
                let byte = 1 + random.below(250) as u8;
                assert_eq!(host.write(lba, blocks, byte), Status::Ok);
                model.versions.get_mut(&volume).unwrap()[range].fill(byte);
            }
            60..75 => {
                assert_eq!(host.unmap(lba, blocks), Status::Ok);
                model.versions.get_mut(&volume).unwrap()[range].fill(0);
            }
            75..80 => assert_eq!(host.flush(), Status::Ok),
            80..86 => {
                model.next += 1;
                let id = rig::snapshot(pool, volume, model.next);
                let bytes = model.versions[&volume].clone();
                model.versions.insert(id, bytes);
            }
            86..90 if model.volumes.len() < 4 => {
                let snapshots = model.versions.keys();
                let snapshots = snapshots.filter(|id| !model.volumes.contains(id));
                let Some(source) = snapshots.copied().next_back() else {
                    continue;
                };
                model.next += 1;
                let id = rig::clone(pool, source, model.next);
                let bytes = model.versions[&source].clone();
                model.versions.insert(id, bytes);
                model.volumes.push(id);
            }
            90..95 => {
                let mut snapshots = model.versions.keys();
                let Some(id) = snapshots.find(|id| !model.volumes.contains(id)).copied() else {
                    continue;
                };
                run(pool, Command::Delete { lvol: id }).unwrap();
                model.versions.remove(&id);
            }
            95..97 if model.volumes.len() > 1 => {
                let id = model.volumes.pop().unwrap();
                hosts.remove(&id);
                run(pool, Command::Delete { lvol: id }).unwrap();
                model.versions.remove(&id);
            }
            97..99 => {
                run(pool, Command::Inflate { lvol: volume }).unwrap();
            }
            _ => {
                let (status, read) = host.read(lba, blocks);
                assert_eq!(status, Status::Ok);
                let expected = &model.versions[&volume][range];
                let found = read.chunks(BLOCK as usize).map(|block| block[0]);
                assert!(found.eq(expected.iter().copied()), "seed {seed}");
            }
        }
    }
}

#[test]
fn every_version_keeps_its_contents() {
    (0..6).for_each(|seed| live(seed, false));
}

/// The same for a volume on a device outside of the pool, and its snapshots and clones.
#[test]
fn every_version_on_a_device_keeps_its_contents() {
    (10..16).for_each(|seed| live(seed, true));
}

fn live(seed: u64, has_device: bool) {
    {
        let mut random = Random::new(seed);
        let registry = Registry::new();
        let mut home = Home::new(&registry);
        home.disk("disk", 256);
        let mut pool = home.create();
        let mebibytes = (BLOCKS * u64::from(BLOCK)) >> 20;
        let (first, bytes) = if has_device {
            external::device(&home, "gold", mebibytes);
            let bytes = (0..BLOCKS).map(external::byte).collect();
            (external::clone(&home, &pool, "gold", 1).unwrap(), bytes)
        } else {
            let first = rig::volume(&pool, 1, mebibytes);
            (first, vec![0; BLOCKS as usize])
        };
        let mut model = Model {
            versions: BTreeMap::from([(first, bytes)]),
            volumes: vec![first],
            next: 1,
        };
        for _ in 0..4 {
            one_life(&pool, &mut model, &mut random, seed);
            verify(&pool, &model, seed);
            drop(pool);
            home = Home::new(&home.kill());
            pool = home.import().0;
            external::attach_all(&home, &pool);
            verify(&pool, &model, seed);
            rig::check(&pool);
        }
    }
}
