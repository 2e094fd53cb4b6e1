//! Tests of the daemon under the name of SPDK's target, and with configuration files written by
//! SPDK.

use super::*;

#[test]
fn started_as_nvmf_tgt_it_is_that_program() {
    let place = Place::new();
    let start = |extra: &[&str]| {
        let log = std::fs::File::create(place.path("log")).unwrap();
        let mut command = place.nacre();
        command
            .arg0("/opt/spdk/build/bin/nvmf_tgt")
            .arg("-r")
            .arg(place.socket());
        command
            .args(["-s", "16", "--no-huge", "-i", "0", "-e", "0xFFFF"])
            .args(extra);
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Daemon {
            child,
            socket: place.socket(),
            log: place.path("log"),
        }
    };
    let mut daemon = start(&["--wait-for-rpc"]);
    let mut client = daemon.connect();
    let early = client
        .call_by_name("bdev_get_bdevs", Value::Null)
        .unwrap_err()
        .to_string();
    assert!(
        early.contains("Method may only be called after framework is initialized"),
        "{early}"
    );
    assert_eq!(
        client
            .call_by_name("bdev_set_options", json!({ "bdev_io_cache_size": 64 }))
            .unwrap(),
        true
    );
    assert_eq!(
        client
            .call_by_name("framework_start_init", Value::Null)
            .unwrap(),
        true
    );
    let lcores = |client: &mut Client| -> Vec<Value> {
        let all = client
            .call_by_name("framework_get_reactors", Value::Null)
            .unwrap();
        let reactors = all["reactors"].as_array().unwrap();
        reactors.iter().map(|one| one["lcore"].clone()).collect()
    };
    assert_eq!(
        lcores(&mut client).len(),
        1,
        "one core unless told otherwise"
    );
    client
        .call_by_name(
            "bdev_malloc_create",
            json!({ "name": "M", "num_blocks": 64, "block_size": 512 }),
        )
        .unwrap();
    let saved = client.call_by_name("config_export", Value::Null).unwrap();
    drop(daemon);
    assert!(!place.path(".local").exists(), "it keeps no state");

    let config = place.path("saved.json");
    std::fs::write(&config, saved.to_string()).unwrap();
    let (_daemon, mut client) = start(&["--lcores", "3@0", "-c", config.to_str().unwrap()]).ready();
    assert_eq!(lcores(&mut client), [0]);
    let mut names = client
        .call_by_name("bdev_get_bdevs", json!({ "name": "M", "timeout": 5000 }))
        .unwrap();
    assert_eq!(names[0]["name"].take(), "M");
    assert_eq!(
        client.call_by_name("config_export", Value::Null).unwrap(),
        saved,
        "what was saved is what is loaded"
    );
}

/// Goal: a daemon that keeps its state starts with SPDK's configuration any number of times: the
/// objects of the first start remain, with later changes. Method: the same command line three
/// times, killed in between.
#[test]
fn a_json_configuration_is_carried_out_once() {
    let place = Place::new();
    let (config, port) = (place.path("spdk.json"), local_port().to_string());
    let nqn = "nqn.2026-01.org.example:a";
    let calls = |subsystem: &str, calls: Value| json!({ "subsystem": subsystem, "config": calls });
    let address =
        json!({ "trtype": "tcp", "adrfam": "ipv4", "traddr": "127.0.0.1", "trsvcid": port });
    let referral =
        json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "192.0.2.1", "trsvcid": "8009" });
    let saved = json!({ "subsystems": [
        calls("bdev", json!([
            { "method": "bdev_set_options", "params": { "bdev_io_cache_size": 64 } },
            { "method": "bdev_null_create", "params": { "name": "n", "num_blocks": 2048, "block_size": 512 } },
            { "method": "bdev_error_create", "params": { "base_name": "n" } },
            { "method": "bdev_set_qos_limit", "params": { "name": "n", "rw_ios_per_sec": 20000 } },
            { "method": "bdev_wait_for_examine" },
        ])),
        calls("nvmf", json!([
            { "method": "nvmf_set_config", "params": { "discovery_filters": [] } },
            { "method": "nvmf_create_transport", "params": { "trtype": "tcp", "max_queue_depth": 64 } },
            { "method": "nvmf_create_subsystem", "params": { "nqn": nqn, "serial_number": "1", "ana_reporting": true } },
            { "method": "nvmf_subsystem_add_host", "params": { "nqn": nqn, "host": "nqn.2026-01.org.example:host" } },
            { "method": "nvmf_subsystem_add_ns", "params": { "nqn": nqn, "namespace": { "bdev_name": "EE_n", "hide_metadata": false } } },
            { "method": "nvmf_subsystem_add_listener", "params": { "nqn": nqn, "listen_address": address, "secure_channel": false } },
            { "method": "nvmf_discovery_add_referral", "params": { "address": referral, "subnqn": "nqn.2014-08.org.nvmexpress.discovery" } },
        ])),
    ] });
    std::fs::write(&config, saved.to_string()).unwrap();
    let mut before = Value::Null;
    for round in 0..3 {
        let (daemon, mut client) = place.serve(&["-c", config.to_str().unwrap()]).ready();
        let referral = json!({ "trtype": "TCP", "traddr": "192.0.2.2", "trsvcid": "1" });
        // When framework_wait_init answers, the objects of the last call and of later changes
        // exist.
        let all = client.call_by_name("nvmf_discovery_get_referrals", Value::Null);
        let all = all.unwrap().as_array().unwrap().len();
        assert_eq!(all, 1 + round.min(1), "{}", daemon.log());
        let now = client.call_by_name("config_export", Value::Null).unwrap();
        match round {
            0 => {
                let resize = json!({ "name": "n", "new_size": 2 });
                client.call_by_name("bdev_null_resize", resize).unwrap();
                let params = json!({ "address": referral });
                client
                    .call_by_name("nvmf_discovery_add_referral", params)
                    .unwrap();
                before = client.call_by_name("config_export", Value::Null).unwrap();
            }
            _ => assert_eq!(now, before, "round {round}"),
        }
        if round == 2 {
            daemon.signal("TERM");
            assert_eq!(daemon.ended(), 0);
        }
    }
}

/// Goal: SPDK's files have more in them than this daemon has, and comments. Method: what every
/// spdk_tgt saves, then a method that a subsystem of ours has not. The calls are many, and all of
/// them were tried when framework_wait_init answers.
#[test]
fn subsystems_that_are_not_here_are_skipped() {
    let place = Place::new();
    let config = place.path("spdk.json");
    let null = |at: usize| {
        let params = json!({ "name": format!("n{at}"), "num_blocks": 8, "block_size": 512 });
        json!({ "method": "bdev_null_create", "params": params })
    };
    let nulls: Vec<Value> = (0..300).map(null).collect();
    let entry =
        |name: &str, calls: Value| json!({ "subsystem": name, "config": calls }).to_string();
    let text = [
        "// saved by hand\n{\"subsystems\": [".into(),
        entry("vmd", json!([])) + ",",
        entry(
            "fsdev",
            json!([{ "method": "fsdev_set_opts", "params": {} }]),
        ) + ", /* RAM */",
        entry(
            "iscsi",
            json!([[{ "method": "iscsi_set_options", "params": {} }]]),
        ) + ",",
        entry("bdev", json!(nulls)) + ",",
        entry("scsi", Value::Null) + "]}",
    ];
    std::fs::write(&config, text.concat()).unwrap();
    let args = ["-c", config.to_str().unwrap()];
    let (daemon, mut client) = place.serve(&args).ready();
    let all = client.call_by_name("bdev_get_bdevs", Value::Null).unwrap();
    assert_eq!(all.as_array().unwrap().len(), 300);
    assert!(
        daemon.log().contains("iscsi_set_options"),
        "{}",
        daemon.log()
    );
    drop((daemon, client));

    let unknown = entry(
        "bdev",
        json!([{ "method": "bdev_ftl_create", "params": {} }]),
    );
    std::fs::write(&config, format!("{{\"subsystems\": [{unknown}]}}")).unwrap();
    let daemon = place.serve(&args);
    let log = daemon.log.clone();
    assert_eq!(daemon.ended(), 1);
    let log = std::fs::read_to_string(log).unwrap();
    assert!(
        log.contains("there is no method \"bdev_ftl_create\""),
        "{log}"
    );
}
