//! Goal: no order of I/O, crash or lost cache breaks an invariant; and each rule is needed.
//! Method: many seeds of [`super::world`]; then the same with one rule broken on purpose, until the
//! checker finds it. The same seed without the fault passes.
//!
//! One rule is not here: a root waits until its records are settled. Its own flush makes their data
//! durable, so no crash shows the difference; the rule lets an import fall back to the root before.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::length::Length;
use super::op::Report;
use super::world::{run, run_external};
use crate::mutation::Mutation;

const STEPS: u64 = 1500;

/// Seeds of a run: those of `cargo xtask simulate pool`, or a few.
fn seeds() -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let first = number("NACRE_POOL_SEED").unwrap_or(1);
    let default = Length::of_environment().choose(300, 1_250, 20_000);
    first..first + number("NACRE_POOL_RUNS").unwrap_or(default)
}

fn caught(seed: u64, disks: u64) -> Result<Report, String> {
    caught_in(run, seed, disks)
}

type World = fn(u64, u64, u64) -> Result<Report, String>;

fn caught_in(world: World, seed: u64, disks: u64) -> Result<Report, String> {
    catch_unwind(AssertUnwindSafe(|| world(seed, STEPS, disks))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        Err(format!("panicked: {}", text.unwrap_or_default()))
    })
}

#[test]
fn many_seeds() {
    let mut sum = Report::default();
    for seed in seeds() {
        let report = caught(seed, 1).unwrap_or_else(|what| {
            panic!("seed {seed}: {what}\nreplay: cargo xtask simulate pool --seed {seed} --runs 1")
        });
        sum.writes += report.writes;
        sum.snapshots += report.snapshots;
        sum.clones += report.clones;
        sum.deletions += report.deletions;
        sum.refused += report.refused;
        sum.full += report.full;
        sum.restores += report.restores;
        sum.inflations += report.inflations;
        sum.decouplings += report.decouplings;
        sum.adoptions += report.adoptions;
        sum.read_only += report.read_only;
        sum.crashes += report.crashes;
        sum.dropped += report.dropped;
        sum.discarded += report.discarded;
        sum.checks += report.checks;
        sum.history ^= report.history;
    }
    println!("{sum:?}");
    let enough = [
        sum.writes,
        sum.snapshots,
        sum.deletions,
        sum.restores,
        sum.inflations,
        sum.decouplings,
        // They need a volume without requests and a snapshot of its family.
        sum.adoptions * 10,
        sum.read_only,
        sum.crashes,
        sum.dropped,
        sum.refused,
        sum.full,
        sum.discarded,
        sum.checks,
    ];
    let runs = seeds().end - seeds().start;
    // A few seeds may lack some event.
    let is_enough = enough.iter().all(|count| *count >= runs / 2);
    assert!(runs < 100 || is_enough, "{sum:?}");
}

/// Goal: the invariants hold on disks that lose their caches independently, while disks are added.
/// Method: as above, on two and three disks.
#[test]
fn many_seeds_of_several_disks() {
    let (mut writes, mut added, mut left, mut stayed) = (0, 0, 0, 0);
    let runs = match Length::of_environment() {
        Length::Short => seeds().start..seeds().start + 150,
        Length::Ci | Length::Full => seeds(),
    };
    for seed in runs.clone() {
        let disks = 2 + seed % 2;
        let report = caught(seed, disks).unwrap_or_else(|what| {
            panic!(
                "seed {seed}, {disks} disks: {what}\nreplay: cargo xtask simulate pool --seed {seed} \
                 --runs 1"
            )
        });
        writes += report.writes;
        added += report.disks.saturating_sub(1);
        left += report.left;
        stayed += report.stayed;
    }
    let runs = runs.end - runs.start;
    println!("{writes} writes, {added} disks; {left} left, {stayed} stayed");
    let is_enough = writes > 20 * runs && added > runs / 3 && left > runs / 4 && stayed > runs / 15;
    assert!(runs < 100 || is_enough);
}

/// Goal: the invariants hold for volumes that show external devices. Method: as above, with
/// such volumes beside others.
#[test]
fn many_seeds_of_external_devices() {
    let runs = match Length::of_environment() {
        Length::Short => seeds().start..seeds().start + 200,
        Length::Ci | Length::Full => seeds(),
    };
    let (mut adoptions, mut decouplings, mut devices, mut crashes) = (0, 0, 0, 0);
    for seed in runs.clone() {
        let disks = 1 + seed % 2;
        let report = caught_in(run_external, seed, disks)
            .unwrap_or_else(|what| panic!("seed {seed}, {disks} disks: {what}"));
        adoptions += report.adoptions;
        decouplings += report.decouplings;
        devices += report.devices;
        crashes += report.crashes;
    }
    let runs = runs.end - runs.start;
    println!(
        "{adoptions} adoptions, {decouplings} decouplings, {devices} devices, {crashes} crashes"
    );
    let is_enough = adoptions > runs / 8 && decouplings > runs / 2 && devices > runs / 2;
    assert!(runs < 100 || (is_enough && crashes > runs));
}

/// Goal: a failed seed can be replayed. Method: each map of the standard library has its own order,
/// so a run that depends on one differs from the next. The history includes each write to the disk.
#[test]
fn a_seed_determines_its_run() {
    for seed in 1..=60 {
        let disks = seed % 3 + 1;
        assert_eq!(caught(seed, disks), caught(seed, disks), "seed {seed}");
    }
}

/// Seeds tried for a broken rule.
const MOST: u64 = 2000;

/// Goal: the checker finds a broken rule. Method: seeds from one on that finds it; with
/// [`Length::Full`], from the first one. After a change of the core, another seed may find it.
fn is_found(mutation: Mutation, finder: u64, disks: u64) {
    is_found_in(run, mutation, finder, disks)
}

fn is_found_in(world: World, mutation: Mutation, finder: u64, disks: u64) {
    let first = Length::of_environment().choose(finder, finder, 1);
    for seed in first..finder + MOST {
        Mutation::activate(Some(mutation));
        let outcome = caught_in(world, seed, disks);
        Mutation::activate(None);
        if let Err(what) = outcome {
            println!("{mutation:?}: seed {seed}: {what}");
            let sound = caught_in(world, seed, disks);
            assert!(sound.is_ok(), "seed {seed} fails without it: {sound:?}");
            return;
        }
    }
    panic!(
        "{mutation:?} is not found in the seeds from {first} to {}",
        finder + MOST
    );
}

#[test]
fn forgetting_external_devices() {
    is_found_in(run_external, Mutation::ForgetShownExternal, 1, 1);
}

#[test]
fn omitting_external_nodes() {
    is_found_in(run_external, Mutation::OmitExternalNodes, 1, 1);
}

#[test]
fn forgetting_trims_of_whole_leaves() {
    is_found_in(run_external, Mutation::ForgetRemovedLeaf, 8, 1);
}

#[test]
fn answering_trims_of_devices_unlogged() {
    is_found_in(run_external, Mutation::UnmapUnlogged, 14, 1);
}

#[test]
fn separating_from_devices_unsettled() {
    is_found_in(run_external, Mutation::DetachUnsettled, 24, 1);
}

macro_rules! found {
    (on $disks:literal: $($test:ident: $mutation:ident from $seed:literal,)*) => {
        $(#[test]
        fn $test() {
            is_found(Mutation::$mutation, $seed, $disks);
        })*
    };
}

found! {
    on 1:
    forgetting_records_before: ForgetPrefix from 8,
    forgetting_data: ForgetData from 1,
    answering_trims_unlogged: UnmapUnlogged from 382,
    skipping_verification: SkipVerification from 1,
    overwriting_unsettled_granules: OverwriteUnsettled from 5,
    overwriting_after_an_unmap: OverwriteAfterUnmap from 758,
    settling_without_the_first_flush: SettleWithoutFirstFlush from 2,
    settling_without_the_second_flush: SettleWithoutSecondFlush from 194,
    reusing_units_unsettled: ReuseUnsettled from 124,
    reusing_units_without_grace: ReuseWithoutGrace from 175,
    roots_before_pages: RootBeforePages from 1,
    reusing_pages_of_the_root: ReuseRootPages from 1,
    snapshots_without_drain: SnapshotWithoutDrain from 1,
    writing_shared_units: WriteShared from 1,
    two_passes_at_once: TwoPasses from 20,
    freeing_before_the_deletion_is_durable: FreeBeforeHidden from 583,
    importing_without_a_flush: ImportWithoutFlush from 11,
    reusing_verified_units: ReuseVerified from 5381,
    detaching_unsettled: DetachUnsettled from 1815,
    decoupling_without_copies: DecoupleUncopied from 3,
    decoupling_from_all_ancestors: DecoupleFromAll from 18,
    decoupling_during_a_pass: DecoupleDuringPass from 105,
    adopting_unsettled: AdoptUnsettled from 2055,
    freeing_prepared_contents: FreePrepared from 9,
    read_only_without_grace: ReadOnlyWithoutGrace from 195,
    forgetting_flushes: ForgetFlush from 10,
    forgetting_failed_data: ForgetCancel from 2,
    snapshots_without_grace: SnapshotWithoutGrace from 7,
    snapshots_without_flush: SnapshotWithoutFlush from 4,
    allocating_units_that_are_being_discarded: AllocateDiscarding from 5,
    discarding_units_in_limbo: DiscardLimbo from 30,
    checking_a_root_that_goes: CheckWithoutRoot from 15,
}

found! {
    on 2:
    settling_when_one_disk_is_flushed: SettleFirstDiskOnly from 99,
    writing_to_another_disk: WrongDisk from 1,
    importing_with_a_flush_of_one_disk: ImportFlushesFirstDisk from 35,
    naming_a_disk_before_it_is_known: RootBeforeLabels from 217,
    taking_a_root_of_any_disk: RootOfAnyDisk from 1,
    moving_without_grace: MoveWithoutGrace from 663,
    moving_beside_writes: MoveBesideWrites from 295,
    moving_without_a_flush: MoveUnflushed from 344,
    moving_one_version_only: MoveOneVersion from 8,
    allocating_on_a_disk_that_leaves: AllocateLeaving from 1,
    dropping_a_disk_before_it_is_empty: DropBeforeEmpty from 12,
    giving_a_disk_up_before_a_root: DropBeforeRoot from 20,
}
