//! The model of the verified load: the tags that each block may contain. Each write gives its
//! blocks a tag.

use nacre_random::mix;

pub(crate) const BLOCK: usize = 4096;
const WORDS: usize = BLOCK / 8;

/// State of one block. Each write increments the generation; at most one is in flight.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Entry {
    /// Last generation submitted to the host.
    pub submitted: u64,
    pub acknowledged: u64,
    /// Last generation acknowledged before the submission of a flush that was acknowledged.
    pub flushed: u64,
    /// The last submitted generation that is zeroes; 0: the initial state.
    pub zeroes: u64,
    pub in_use: bool,
}

/// All blocks of a device.
pub(crate) struct Ledger {
    pub entries: Vec<Entry>,
    run: u64,
}

impl Ledger {
    pub(crate) fn new(blocks: usize, run: u64) -> Self {
        Self {
            entries: vec![Entry::default(); blocks],
            run,
        }
    }

    /// The generations acknowledged so far: a flush submitted now must make them durable.
    pub(crate) fn acknowledged(&self) -> Vec<u64> {
        self.entries.iter().map(|e| e.acknowledged).collect()
    }

    /// The model of a copy that was made after `before`, and before now.
    pub(crate) fn copied_since(&self, before: &[Entry]) -> Self {
        let entries = self.entries.iter().zip(before);
        let entries = entries.map(|(now, before)| Entry {
            submitted: now.submitted,
            zeroes: now.zeroes,
            ..*before
        });
        Self {
            entries: entries.collect(),
            run: self.run,
        }
    }

    pub(crate) fn flushed(&mut self, snapshot: &[u64]) {
        for (entry, acknowledged) in self.entries.iter_mut().zip(snapshot) {
            entry.flushed = entry.flushed.max(*acknowledged);
        }
    }

    /// The contents of a block: each word follows from its first three.
    pub(crate) fn fill(&self, lba: usize, generation: u64, block: &mut [u8]) {
        for (at, word) in block.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&self.word(lba, generation, at).to_le_bytes());
        }
    }

    fn word(&self, lba: usize, generation: u64, at: usize) -> u64 {
        match at {
            0 => self.run,
            1 => lba as u64,
            2 => generation,
            // Each word depends on the generation, so a torn block is detected wherever the tear
            // is.
            at => mix(self.run ^ mix((lba as u64) << 40 ^ generation << 9 ^ at as u64)),
        }
    }

    /// Returns the generation in the block, or the error.
    pub(crate) fn check(&self, lba: usize, block: &[u8]) -> Result<u64, String> {
        assert_eq!(block.len(), BLOCK);
        let word = |at: usize| u64::from_le_bytes(block[8 * at..8 * at + 8].try_into().unwrap());
        let entry = &self.entries[lba];
        if block.iter().all(|byte| *byte == 0) {
            return at_least(lba, entry.zeroes, entry);
        }
        let generation = word(2);
        if (word(0), word(1)) != (self.run, lba as u64) {
            let (run, found) = (word(0), word(1));
            return Err(format!("block {lba} holds block {found} of run {run:#x}"));
        }
        if let Some(at) = (3..WORDS).find(|at| word(*at) != self.word(lba, generation, *at)) {
            return Err(format!(
                "block {lba} is torn: generation {generation} up to word {at}"
            ));
        }
        if generation > entry.submitted {
            return Err(format!(
                "block {lba} holds {generation}, from the future: {entry:?}"
            ));
        }
        at_least(lba, generation, entry)
    }
}

/// A killed process loses nothing that the kernel has, so acknowledged writes are as safe as
/// flushed ones here. They are reported differently because only flushed writes are guaranteed.
fn at_least(lba: usize, generation: u64, entry: &Entry) -> Result<u64, String> {
    if generation < entry.flushed {
        return Err(format!(
            "block {lba} lost a flushed write: holds {generation}, {entry:?}"
        ));
    }
    if generation < entry.acknowledged {
        return Err(format!(
            "block {lba} lost a write: holds {generation}, {entry:?}"
        ));
    }
    Ok(generation)
}

/// Goal: the checker detects each kind of damage.
#[test]
fn the_ledger_detects_damage() {
    let mut ledger = Ledger::new(2, 77);
    let mut block = vec![0; BLOCK];
    assert_eq!(ledger.check(1, &block), Ok(0));
    ledger.entries[1] = Entry {
        submitted: 5,
        acknowledged: 4,
        flushed: 3,
        zeroes: 2,
        in_use: false,
    };
    let complaint = |block: &[u8]| ledger.check(1, block).unwrap_err();
    assert!(complaint(&block).contains("flushed"));
    for (generation, said) in [(2, "flushed"), (3, "lost a write"), (6, "future")] {
        ledger.fill(1, generation, &mut block);
        assert!(complaint(&block).contains(said), "{}", complaint(&block));
    }
    ledger.entries[1].zeroes = 4;
    assert_eq!(ledger.check(1, &[0; BLOCK]), Ok(4));
    let complaint = |block: &[u8]| ledger.check(1, block).unwrap_err();
    ledger.fill(0, 4, &mut block);
    assert!(complaint(&block).contains("holds block 0"));
    for generation in [4, 5] {
        ledger.fill(1, generation, &mut block);
        assert_eq!(ledger.check(1, &block), Ok(generation));
    }
    let mut older = vec![0; BLOCK];
    ledger.fill(1, 4, &mut older);
    block[BLOCK / 2..].copy_from_slice(&older[BLOCK / 2..]);
    assert!(complaint(&block).contains("torn"));
}
