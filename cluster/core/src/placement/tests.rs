//! Goal: a placement meets every demand of its wish, and a refusal is right about the demand that
//! it names. Method: random clusters; a checker of its own, which also has to find planted faults.

use proptest::prelude::*;

use super::*;

const GIB: u64 = 1 << 30;
const VOLUME: VolumeId = VolumeId(Uuid::from_u128(77));

fn node(id: u128) -> NodeId {
    NodeId(Uuid::from_u128(id))
}

fn site(id: u128, labels: &[(&str, &str)]) -> Site {
    let labels = labels.iter();
    Site {
        node: node(id),
        is_live: true,
        is_avoided: false,
        labels: labels
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect(),
        replicas: 0,
    }
}

fn pool(id: u128, of: u128) -> PoolFacts {
    PoolFacts {
        id: PoolId(Uuid::from_u128(id)),
        node: node(of),
        class: None,
        is_online: true,
        total: 100 * GIB,
        free: 100 * GIB,
        reserved: 0,
        provisioned: 0,
        promised_thin: 0,
        promised_thick: 0,
        resyncs: 0,
        is_left_out: false,
    }
}

fn wish(count: usize) -> Wish {
    Wish {
        count,
        bytes: GIB,
        ..Wish::default()
    }
}

#[derive(Debug, Clone)]
struct World {
    sites: Vec<Site>,
    pools: Vec<PoolFacts>,
    wish: Wish,
    kept: Vec<NodeId>,
}

impl World {
    fn choose(&self) -> Result<Vec<Choice>, Unplaced> {
        choose(VOLUME, &self.wish, &self.sites, &self.pools, &self.kept)
    }

    fn site(&self, node: NodeId) -> &Site {
        self.sites.iter().find(|s| s.node == node).expect("a site")
    }

    /// The first demand that the choice does not meet.
    fn fault(&self, choice: &[Choice]) -> Option<&'static str> {
        let wish = &self.wish;
        let mut nodes: BTreeSet<NodeId> = self.kept.iter().copied().collect();
        if choice.len() != wish.count {
            return Some("count");
        }
        for one in choice {
            let pool = self.pools.iter().find(|pool| pool.id == one.pool);
            let (Some(pool), site) = (pool, self.site(one.node)) else {
                return Some("pool");
            };
            let faults = [
                (pool.node != one.node, "pool of another node"),
                (!nodes.insert(one.node), "node twice"),
                (!site.is_live, "node away"),
                (site.is_avoided, "node avoided"),
                (!pool.is_online, "pool away"),
                (wish.class.is_some() && pool.class != wish.class, "class"),
                (!self.has_room(pool), "room"),
                (
                    wish.is_resync && (pool.resyncs >= 2 || pool.is_left_out),
                    "busy",
                ),
            ];
            if let Some((_, fault)) = faults.iter().find(|(is_one, _)| *is_one) {
                return Some(fault);
            }
        }
        let of = |node: &NodeId| choice.iter().any(|one| one.node == *node);
        if !wish.nodes.iter().all(of) {
            return Some("named node");
        }
        let is_repeated = |label: &String| {
            let new = choice.iter().map(|one| one.node);
            let all = new.chain(self.kept.iter().copied());
            let values = all.filter_map(|node| self.site(node).labels.get(label));
            let values: Vec<&String> = values.collect();
            // Replicas that stay may be on nodes that an operator named.
            choice.iter().any(|one| {
                let value = self.site(one.node).labels.get(label);
                let same = values.iter().filter(|other| Some(**other) == value);
                value.is_none() || same.count() > 1
            })
        };
        (wish.strict && wish.spread.iter().any(is_repeated)).then_some("spread")
    }

    /// Written down apart from the code under test.
    fn has_room(&self, pool: &PoolFacts) -> bool {
        let (total, bytes) = (u128::from(pool.total), u128::from(self.wish.bytes));
        let used = total - u128::from(pool.free)
            + u128::from(pool.reserved)
            + u128::from(pool.promised_thick);
        let sizes = u128::from(pool.provisioned)
            + u128::from(pool.promised_thin)
            + u128::from(pool.promised_thick);
        if self.wish.thin {
            used * 100 < total * 85 && (sizes + bytes) * 100 <= total * 200
        } else {
            (used + bytes) * 100 <= total * 85
        }
    }

    /// True if a choice exists, found by trying all.
    fn is_possible(&self) -> bool {
        let choices: Vec<Choice> = self
            .pools
            .iter()
            .map(|pool| Choice {
                node: pool.node,
                pool: pool.id,
            })
            .collect();
        self.extend(&mut Vec::new(), &choices)
    }

    fn extend(&self, chosen: &mut Vec<Choice>, rest: &[Choice]) -> bool {
        if chosen.len() == self.wish.count {
            return self.fault(chosen).is_none();
        }
        (0..rest.len()).any(|at| {
            chosen.push(rest[at]);
            let found = self.extend(chosen, &rest[at + 1..]);
            chosen.pop();
            found
        })
    }
}

prop_compose! {
    fn any_site(id: u128)(
        is_live in prop::bool::weighted(0.9),
        is_avoided in prop::bool::weighted(0.1),
        zone in prop::option::weighted(0.9, 0_u8..3),
        rack in prop::option::weighted(0.9, 0_u8..4),
        replicas in 0_u64..20,
    ) -> Site {
        let of = |key: &str, value: Option<u8>| value.map(|v| (key.to_owned(), v.to_string()));
        Site {
            node: node(id),
            is_live,
            is_avoided,
            labels: [of("zone", zone), of("rack", rack)].into_iter().flatten().collect(),
            replicas,
        }
    }
}

prop_compose! {
    fn any_pool(id: u128, nodes: u128)(
        of in 0..nodes,
        class in prop::option::of(prop::sample::select(vec!["fast", "slow"])),
        is_online in prop::bool::weighted(0.9),
        total in 1_u64..200,
        parts in prop::array::uniform5(0_u64..100),
        resyncs in 0_u32..4,
        is_left_out in prop::bool::weighted(0.1),
    ) -> PoolFacts {
        let total = total * GIB;
        let [free, reserved, provisioned, thin, thick] = parts;
        let free = total / 100 * free;
        PoolFacts {
            id: PoolId(Uuid::from_u128(1000 + id)),
            node: node(of),
            class: class.map(str::to_owned),
            is_online,
            total,
            free,
            reserved: free / 400 * reserved,
            provisioned: total / 100 * provisioned,
            promised_thin: total / 200 * thin,
            promised_thick: total / 800 * thick,
            resyncs,
            is_left_out,
        }
    }
}

fn any_world() -> impl Strategy<Value = World> {
    let sizes = (1_u128..8, 0_usize..10);
    sizes.prop_flat_map(|(nodes, pools)| {
        let sites: Vec<_> = (0..nodes).map(any_site).collect();
        let pools: Vec<_> = (0..pools as u128).map(|id| any_pool(id, nodes)).collect();
        let spread = prop::sample::subsequence(vec!["zone", "rack"], 0..=2);
        let few = prop::collection::btree_set(0..nodes, 0..3);
        let wish = (
            (
                1_usize..4,
                1_u64..60,
                any::<bool>(),
                any::<bool>(),
                any::<bool>(),
            ),
            prop::option::weighted(0.3, Just("fast".to_owned())),
            spread,
            prop::collection::btree_set(0..nodes, 0..2),
        );
        (sites, pools, wish, few).prop_map(|(sites, pools, wish, kept)| {
            let ((count, gib, thin, strict, is_resync), class, spread, named) = wish;
            let wish = Wish {
                count,
                bytes: gib * GIB,
                thin,
                class,
                spread: spread.into_iter().map(str::to_owned).collect(),
                strict,
                nodes: named.into_iter().map(node).collect(),
                is_resync,
            };
            World {
                sites,
                pools,
                wish,
                kept: kept.into_iter().map(node).collect(),
            }
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn a_choice_meets_all_demands(world in any_world()) {
        match world.choose() {
            Ok(choice) => prop_assert_eq!(world.fault(&choice), None, "{:?}", choice),
            Err(Unplaced::Count { .. }) => prop_assert!(world.wish.nodes.len() > world.wish.count),
            Err(refused) => prop_assert!(!world.is_possible(), "{:?}", refused),
        }
        prop_assert_eq!(world.choose(), world.choose(), "the same facts, the same choice");
    }

    /// Without strictness, as many values of the first label are used as there can be, unless named
    /// nodes take them.
    #[test]
    fn a_soft_spread_uses_all_zones(world in any_world()) {
        let mut world = world;
        world.wish.strict = false;
        world.wish.spread = vec!["zone".to_owned()];
        world.wish.nodes.clear();
        world.kept.clear();
        if let Ok(choice) = world.choose() {
            let value = |node: NodeId| world.site(node).labels.get("zone").cloned();
            let used: BTreeSet<_> = choice.iter().map(|one| value(one.node)).collect();
            let single = World {
                wish: Wish { count: 1, ..world.wish.clone() },
                ..world.clone()
            };
            let fits = |pool: &&PoolFacts| {
                let one = Choice { node: pool.node, pool: pool.id };
                single.fault(&[one]).is_none()
            };
            let fitting = world.pools.iter().filter(fits);
            let all: BTreeSet<_> = fitting.map(|pool| value(pool.node)).collect();
            prop_assert_eq!(used.len(), all.len().min(world.wish.count));
        }
    }
}

/// Goal: the checker of these tests finds each fault. Method: one good choice, then one change for
/// each demand.
#[test]
fn the_checker_finds_each_fault() {
    let sites = (0..4).map(|id| {
        let value = id.to_string();
        site(id, &[("zone", &value)])
    });
    let mut good = World {
        sites: sites.collect(),
        pools: (0..4).map(|id| pool(100 + id, id)).collect(),
        wish: Wish {
            spread: vec!["zone".to_owned()],
            strict: true,
            class: Some("fast".to_owned()),
            nodes: vec![node(1)],
            is_resync: true,
            ..wish(2)
        },
        kept: vec![node(3)],
    };
    good.pools
        .iter_mut()
        .for_each(|pool| pool.class = Some("fast".to_owned()));
    let choice = good.choose().expect("there is room");
    assert_eq!(good.fault(&choice), None);
    let at = choice[0].node;
    type Change<'a> = &'a dyn Fn(&mut World, &mut Vec<Choice>);
    let of = |world: &mut World, change: fn(&mut PoolFacts)| {
        world
            .pools
            .iter_mut()
            .filter(|pool| pool.node == at)
            .for_each(change);
    };
    let on = |world: &mut World, change: fn(&mut Site)| {
        world
            .sites
            .iter_mut()
            .filter(|site| site.node == at)
            .for_each(change);
    };
    let faults: [(&str, Change<'_>); 13] = [
        ("count", &|_, choice| choice.truncate(1)),
        ("pool", &|_, choice| choice[0].pool = PoolId(Uuid::nil())),
        ("pool of another node", &|_, choice| {
            choice[0].pool = choice[1].pool
        }),
        ("node twice", &|_, choice| choice[1] = choice[0]),
        ("node twice", &|world, _| world.kept.push(at)),
        ("node away", &|world, _| {
            on(world, |site| site.is_live = false)
        }),
        ("node avoided", &|world, _| {
            on(world, |site| site.is_avoided = true)
        }),
        ("pool away", &|world, _| {
            of(world, |pool| pool.is_online = false)
        }),
        ("class", &|world, _| of(world, |pool| pool.class = None)),
        ("room", &|world, _| of(world, |pool| pool.free = 15 * GIB)),
        ("busy", &|world, _| of(world, |pool| pool.resyncs = 2)),
        ("named node", &|world, _| world.wish.nodes = vec![node(9)]),
        ("spread", &|world, _| {
            for site in &mut world.sites {
                site.labels.insert("zone".to_owned(), "same".to_owned());
            }
        }),
    ];
    for (fault, change) in faults {
        let (mut world, mut choice) = (good.clone(), choice.clone());
        change(&mut world, &mut choice);
        assert_eq!(world.fault(&choice), Some(fault));
        // The code under test makes no such choice either.
        if let Ok(choice) = world.choose() {
            assert_eq!(world.fault(&choice), None, "{fault}");
        }
    }
}

#[test]
fn the_least_used_pool_is_chosen() {
    let sites: Vec<Site> = (0..3).map(|id| site(id, &[])).collect();
    let mut pools: Vec<PoolFacts> = (0..3).map(|id| pool(100 + id, id)).collect();
    pools[0].provisioned = 20 * GIB;
    pools[1].promised_thin = 10 * GIB;
    pools[2].promised_thick = 30 * GIB;
    let chosen = |sites: &[Site], pools: &[PoolFacts], count| {
        let choice = choose(VOLUME, &wish(count), sites, pools, &[]);
        let choice = choice.expect("there is room");
        choice
            .iter()
            .map(|one| one.node.0.as_u128())
            .collect::<Vec<_>>()
    };
    assert_eq!(chosen(&sites, &pools, 2), [1, 0]);
    // A node with many replicas is used as if its pool were as full.
    let mut busy = sites.clone();
    busy[1].replicas = 9;
    busy[0].replicas = 1;
    assert_eq!(chosen(&busy, &pools, 1), [0]);
    // The hash spreads volumes over equal pools.
    let equal: Vec<PoolFacts> = (0..3).map(|id| pool(100 + id, id)).collect();
    let first = |volume: u128| {
        let choice = choose(
            VolumeId(Uuid::from_u128(volume)),
            &wish(1),
            &sites,
            &equal,
            &[],
        );
        choice.expect("there is room")[0].node
    };
    let used: BTreeSet<NodeId> = (0..50).map(first).collect();
    assert_eq!(used.len(), 3);
}

#[test]
fn a_refusal_names_the_demand() {
    let sites: Vec<Site> = (0..3).map(|id| site(id, &[("zone", "a")])).collect();
    let pools: Vec<PoolFacts> = (0..3).map(|id| pool(100 + id, id)).collect();
    type Change = fn(&mut World);
    let cases: [(Change, Demand, usize); 8] = [
        (|w| w.sites[0].is_live = false, Demand::Live, 2),
        (|w| w.sites[0].is_avoided = true, Demand::Admitted, 2),
        (|w| w.kept.push(node(1)), Demand::Free, 2),
        (|w| w.pools[2].is_online = false, Demand::Pool, 2),
        (
            |w| w.wish.class = Some("fast".to_owned()),
            Demand::Class("fast".to_owned()),
            0,
        ),
        (
            |w| w.wish.bytes = 86 * GIB,
            Demand::Room {
                bytes: 86 * GIB,
                most: 85 * GIB,
            },
            0,
        ),
        (
            |w| {
                w.wish.is_resync = true;
                w.pools[0].resyncs = MAX_RESYNCS;
            },
            Demand::Idle,
            2,
        ),
        (
            |w| {
                w.wish.strict = true;
                w.wish.spread = vec!["zone".to_owned()];
            },
            Demand::Spread("zone".to_owned()),
            1,
        ),
    ];
    for (change, demand, nodes) in cases {
        let mut world = World {
            sites: sites.clone(),
            pools: pools.clone(),
            wish: wish(3),
            kept: Vec::new(),
        };
        change(&mut world);
        let expected = Unplaced::Unmet {
            demand,
            nodes,
            wanted: 3,
            node: None,
        };
        assert_eq!(world.choose(), Err(expected));
    }
    // A named node is named in the refusal.
    let mut world = World {
        sites,
        pools,
        wish: wish(1),
        kept: Vec::new(),
    };
    world.wish.nodes = vec![node(2)];
    world.pools[2].is_online = false;
    let Err(Unplaced::Unmet {
        node: unmet,
        demand,
        ..
    }) = world.choose()
    else {
        panic!("the pool is away");
    };
    assert_eq!((unmet, demand), (Some(node(2)), Demand::Pool));
    world.wish.nodes.push(node(1));
    assert!(matches!(world.choose(), Err(Unplaced::Count { .. })));
}

/// A thin replica needs a part of its size at first. A pool that is nearly full takes none.
#[test]
fn room_for_thin_replicas() {
    let mut pool = pool(1, 1);
    assert_eq!(pool.room(true), 200 * GIB);
    assert_eq!(pool.room(false), 85 * GIB);
    pool.provisioned = 150 * GIB;
    pool.promised_thin = 20 * GIB;
    assert_eq!(pool.room(true), 30 * GIB);
    pool.free = 15 * GIB;
    assert_eq!((pool.room(true), pool.room(false)), (0, 0));
}

#[test]
fn the_lvol_of_a_replica_is_another_device() {
    let one = lvol_of(Uuid::from_u128(1));
    assert_ne!(one, Uuid::from_u128(1));
    assert_ne!(one, lvol_of(Uuid::from_u128(2)));
    assert_eq!(one, lvol_of(Uuid::from_u128(1)));
}
