mod frames;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvpool::{DeviceId, Dtype};

use super::*;

const REDIS: &str = "redis://127.0.0.1:6379";
const ETCD: &str = "etcd://127.0.0.1:2379/prod";

fn key(name: &str) -> &'static Key {
    Key::find(name).unwrap_or_else(|| panic!("no key {name}"))
}

fn flags(flags: &[(&str, &str)]) -> Sources {
    let find = |name: &str| if name == CONFIG.name { &CONFIG } else { key(name) };
    flags.iter().fold(Sources::new(), |sources, (name, value)| sources.flag(find(name), *value))
}

fn load(with: &[(&str, &str)]) -> Settings {
    flags(with).load().unwrap_or_else(|error| panic!("{with:?}: {error}")).settings
}

fn refused(with: &[(&str, &str)]) -> String {
    match flags(with).load() {
        Err(error) => error.to_string(),
        Ok(loaded) => panic!("{with:?} gave {:?}", loaded.settings),
    }
}

fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kvpool.toml");
    fs::write(&path, text).unwrap();
    (folder, path)
}

fn with_file(path: &Path) -> Sources {
    Sources::new().flag(&CONFIG, path.to_str().unwrap())
}

fn file_refused(text: &str) -> String {
    let (_folder, path) = file(text);
    let error = with_file(&path).load().expect_err(text).to_string();
    error.replace(&format!("{}/", path.parent().unwrap().display()), "")
}

fn variables(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    pairs.iter().map(|(name, value)| (name.into(), value.into())).collect()
}

#[test]
fn everything_is_on_the_loopback_by_default() {
    let settings = load(&[]);
    assert!(settings.listen.unwrap().is_loopback() && settings.admin.unwrap().address().is_loopback());
    assert!(settings.tls.is_none() && settings.token.is_none() && settings.peers.is_empty());
    let pool = settings.pool;
    assert_eq!((pool.blocks, pool.blocks_max, pool.reserve), (20_000, 40_000, 0));
    assert_eq!((pool.device, pool.layout.block_tokens()), (DeviceId::Host, 16));
    assert_eq!(pool.layout.packed_bytes(), 16 * 16);
    assert_eq!(load(&[("layout", "Probe")]).pool.layout, pool.layout, "case does not matter");
    let defrag = DefragSettings { threshold: 0.02, interval: Duration::from_millis(2) };
    assert_eq!((pool.defrag, settings.load, settings.migrate), (Some(defrag), None, None));
}

#[test]
fn every_key_is_read_from_a_flag_a_variable_and_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    fs::write(&token, "0123456789abcdef\n").unwrap();
    let token = token.to_str().unwrap();
    let reader = folder.path().join("reader");
    fs::write(&reader, "a-token-that-reads\n").unwrap();
    let reader = reader.to_str().unwrap();
    let values = [
        ("name", "a-1"),
        ("size", "100"),
        ("size-max", "300"),
        ("block-tokens", "32"),
        ("layout", "qwen2.5-0.5b"),
        ("dtype", "f32"),
        ("device", "cuda:3"),
        ("defrag-threshold", "0.5"),
        ("defrag-interval", "1s"),
        ("eviction", "priority"),
        ("tenants", "7=1MiB..2GiB,8=..1GiB"),
        ("tenant-hints", "64MiB"),
        ("reserve", "7"),
        ("listen", "unix:/tmp/node.sock"),
        ("admin", "localhost:0"),
        ("admin-connections", "100"),
        ("peers", "b=127.0.0.1:7,c=unix:/c.sock"),
        ("tls-cert", "c.pem"),
        ("tls-key", "k.pem"),
        ("tls-ca", "ca.pem"),
        ("token-file", token),
        ("read-token-file", reader),
        ("hash-key-file", token),
        ("peer-quota", "2GiB"),
        ("nixl", "/opt/nixl"),
        ("migrate-below", "20"),
        ("migrate-to", "c"),
        ("restarts", "by-name"),
        ("doubt-limit", "10min"),
        ("tier", "rediss://:secret@10.0.0.9:6379/2"),
        ("tier-ca", "tier.pem"),
        ("tier-namespace", "qwen2.5-7b, revision 3"),
        ("tier-policy", "on-eviction"),
        ("tier-wait", "50ms"),
        ("tier-patience", "2s"),
        ("tier-threads", "3"),
        ("membership", "etcds://kv:secret@10.0.0.5:2379,etcd-2:2379/prod"),
        ("membership-ca", "etcd.pem"),
        ("membership-cert", "client.pem"),
        ("membership-key", "client.key"),
        ("membership-lease", "5s"),
        ("advertise", "gpu-node-1:7411"),
        ("kv-events", "tcp://127.0.0.1:5557"),
        ("kv-events-replay", "tcp://[::1]:5558"),
        ("kv-events-topic", "off"),
        ("kv-events-hashes", "bytes"),
        ("load", "conversations"),
        ("load-threads", "5"),
        ("load-rest", "20ms"),
        ("drain", "30s"),
        ("log", "json"),
        ("log-level", "info,kvpool_node::tier=debug"),
        ("otel-endpoint", "http://127.0.0.1:4318"),
    ];
    assert_eq!(values.map(|(name, _)| name).to_vec(), KEYS.iter().map(|key| key.name).collect::<Vec<_>>());
    let by_flag = load(&values);
    let vars: Vec<_> = values.iter().map(|(name, value)| (key(name).variable(), *value)).collect();
    let vars: Vec<_> = vars.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    let by_variable = Sources::new().environment(variables(&vars)).load().unwrap();
    let text: String =
        values.iter().map(|(name, value)| format!("{} = {value:?}\n", key(name).in_file())).collect();
    let (_folder, path) = file(&text);
    let by_file = with_file(&path).load().unwrap().settings;
    for settings in [by_flag, by_variable.settings, by_file] {
        let pool = &settings.pool;
        assert_eq!(
            (settings.name.as_str(), pool.blocks, pool.blocks_max, pool.reserve),
            ("a-1", 100, 300, 7)
        );
        assert_eq!((pool.layout.block_tokens(), pool.layout.dtype()), (32, Dtype::F32));
        assert_eq!((pool.device, pool.eviction.unwrap().name()), (DeviceId::Cuda(3), "priority"));
        assert_eq!(pool.defrag, Some(DefragSettings { threshold: 0.5, interval: Duration::from_secs(1) }));
        assert_eq!(settings.listen, Some(Address::Unix("/tmp/node.sock".into())));
        assert_eq!((settings.admin, settings.admin_connections), ("localhost:0".parse().ok(), 100));
        let peers: Vec<_> =
            settings.peers.iter().map(|peer| format!("{}={}", peer.name, peer.address)).collect();
        assert_eq!(peers, ["b=127.0.0.1:7", "c=unix:/c.sock"]);
        let tls = TlsFiles { cert: "c.pem".into(), key: "k.pem".into(), ca: Some("ca.pem".into()) };
        assert_eq!(settings.tls, Some(tls));
        assert!(settings.token.unwrap().accept(b"0123456789abcdef"));
        assert_eq!(settings.peer_quota_bytes, 2 << 30);
        assert_eq!(settings.migrate, Some(MigrateBelow { blocks: 20, to: "c".into() }));
        assert_eq!(settings.nixl, Some(NixlLocation::At("/opt/nixl".into())));
        let (kind, rest) = (LoadKind::Conversations, Duration::from_millis(20));
        assert_eq!(settings.load, Some(LoadSettings { kind, threads: 5, rest }));
        assert_eq!(settings.drain, Duration::from_secs(30));
        check_services(settings.tier, settings.membership, settings.kv_events);
    }
}

fn check_services(
    tier: Option<SharedTierSettings>,
    membership: Option<MembershipSettings>,
    events: Option<EventSettings>,
) {
    let tier = tier.unwrap();
    assert_eq!(
        (tier.address.expose(), &*tier.namespace),
        ("rediss://:secret@10.0.0.9:6379/2", "qwen2.5-7b, revision 3")
    );
    assert_eq!(tier.ca, Some("tier.pem".into()));
    assert!(!format!("{tier:?}").contains("secret"), "{tier:?}");
    assert_eq!((tier.policy, tier.threads), (TierUse::OnEviction, 3));
    assert_eq!((tier.wait, tier.patience), (Duration::from_millis(50), Duration::from_secs(2)));
    assert!(!format!("{membership:?}").contains("secret"), "{membership:?}");
    let MembershipSettings { location, ca, certificate, lease, advertise } = membership.unwrap();
    assert_eq!(ca, Some("etcd.pem".into()));
    assert_eq!(certificate, Some(("client.pem".into(), "client.key".into())));
    assert_eq!(location.to_string(), "etcds://10.0.0.5:2379,etcd-2:2379/prod");
    assert_eq!(
        (lease, advertise.unwrap().to_string()),
        (Duration::from_secs(5), "gpu-node-1:7411".to_owned())
    );
    let events = events.unwrap();
    assert_eq!(
        (events.listen.to_string(), events.replay.unwrap().to_string()),
        ("127.0.0.1:5557".to_owned(), "[::1]:5558".to_owned())
    );
    // A topic may have any name.
    assert_eq!((&*events.topic, events.full_hashes), ("off", true));
}

#[test]
fn flags_win_over_variables_and_these_over_the_file() {
    let (_folder, path) = file("size = 1000\nreserve = 1\nblock-tokens = 8\n[peers]\nx = \"localhost:1\"\n");
    let sources = with_file(&path)
        .environment(variables(&[("KVPOOL_SIZE", "2000"), ("KVPOOL_RESERVE", "2"), ("HOME", "/")]))
        .flag(key("size"), "3000");
    let settings = sources.load().unwrap().settings;
    let pool = settings.pool;
    assert_eq!((pool.blocks, pool.reserve, pool.layout.block_tokens()), (3000, 2, 8));
    assert_eq!(settings.peers[0].name, "x");
    // The file is read again.
    fs::write(&path, "peers = [\"y=localhost:1\", \"z=localhost:2\"]").unwrap();
    let names: Vec<_> = sources.load().unwrap().settings.peers.into_iter().map(|peer| peer.name).collect();
    assert_eq!(names, ["y", "z"]);
    // The file itself may be named by a variable.
    let named = [("KVPOOL_CONFIG", path.to_str().unwrap())];
    assert_eq!(Sources::new().environment(variables(&named)).load().unwrap().settings.peers.len(), 2);
}

#[test]
fn sizes_are_blocks_or_bytes() {
    let block = load(&[]).pool.layout.bytes_per_block() as u64;
    for (size, blocks) in [
        ("1", 1),
        ("1MiB", (1 << 20) / block - 1),
        ("1 GiB", (1 << 30) / block - 1),
        ("2mb", 2_000_000 / block - 1),
    ] {
        assert_eq!(load(&[("size", size)]).pool.blocks as u64, blocks, "{size}");
    }
    for (size, reason) in [
        ("0", "below 1"),
        ("", "below 1"),
        ("-3", "unit"),
        ("1.5GiB", "unit"),
        ("10 blocks", "unit"),
        ("1B", "too small"),
        ("99999999TiB", "64 bits"),
        ("99999999999999999999", "whole number"),
    ] {
        let error = refused(&[("size", size)]);
        let is_named = error.starts_with(&format!("--size: size = {size:?}: "));
        assert!(is_named && error.contains("; accepted: a number of blocks"), "{error}");
        assert!(error.contains(reason) || size.is_empty(), "{error}");
    }
}

#[test]
fn each_bad_value_is_named_with_its_place_and_what_is_accepted() {
    for (name, bad) in [
        ("name", "a b"),
        ("name", ""),
        ("size-max", "19999"),
        ("block-tokens", "0"),
        ("block-tokens", "4097"),
        ("layout", "gpt-5"),
        ("dtype", "f64"),
        ("device", "gpu"),
        ("defrag-threshold", "1.1"),
        ("defrag-threshold", "nan"),
        ("defrag-interval", "5"),
        ("defrag-interval", "0ms"),
        ("defrag-interval", "off"),
        ("eviction", "mru"),
        ("tenants", "7"),
        ("tenants", "a=1MiB.."),
        ("tenants", "7=1MiB"),
        ("tenants", "7=1..2"),
        ("tenants", "7=..1MiB,7=..2MiB"),
        ("tenant-hints", "1"),
        ("tenant-hints", "1MiB"),
        ("reserve", "20000"),
        ("listen", "127.0.0.1"),
        ("listen", "node-3:80"),
        ("listen", "unix:"),
        ("admin", "::1:80"),
        ("admin", "127.0.0.1:99999"),
        ("admin", "https://unix:/tmp/x"),
        ("admin", "ftp://127.0.0.1:1"),
        ("admin-connections", "7"),
        ("peers", "b"),
        ("peers", "b=localhost:0"),
        ("peers", "b=localhost:1,b=localhost:2"),
        ("peers", "b=bad host:1"),
        ("tls-cert", ""),
        ("peer-quota", "100"),
        ("peer-quota", "100B"),
        ("migrate-below", "0"),
        ("migrate-to", "a/b"),
        ("restarts", "always"),
        ("doubt-limit", "100ms"),
        ("tier", "127.0.0.1:6379"),
        ("tier", "memcached://127.0.0.1:1"),
        ("tier", "redis://127.0.0.1"),
        ("tier", "redis://:6379"),
        ("tier", "redis://127.0.0.1:0"),
        ("tier", "redis://127.0.0.1:6379/x"),
        ("tier", "redis+unix://x"),
        ("tier", "file:///var/cache/kvpool"),
        ("tier", "file://var/cache"),
        ("tier", "mooncake://"),
        ("tier", "mooncake://127.0.0.1:1/x"),
        ("tier-namespace", ""),
        ("tier-policy", "sometimes"),
        ("tier-wait", "11s"),
        ("tier-patience", "1ms"),
        ("tier-threads", "0"),
        ("membership", "127.0.0.1:2379/prod"),
        ("membership", "etcd://127.0.0.1:2379"),
        ("membership", "etcd://127.0.0.1/prod"),
        ("membership-lease", "500ms"),
        ("advertise", "10.0.0.1"),
        ("kv-events", "127.0.0.1:5557"),
        ("kv-events", "tcp://localhost:5557"),
        ("kv-events-replay", "tcp://*"),
        ("kv-events-hashes", "hex"),
        ("load", "storms"),
        ("load-threads", "65"),
        ("load-rest", "2s"),
        ("drain", "2h"),
    ] {
        let error = refused(&[(name, bad)]);
        let in_file = key(name).in_file();
        assert!(error.starts_with(&format!("--{name}: {in_file} = {bad:?}: ")), "{error}");
        assert!(error.ends_with(&format!("; accepted: {}", key(name).accepted)), "{error}");

        let variable = key(name).variable();
        let sources = Sources::new().environment(variables(&[(&variable, bad)]));
        let error = sources.load().unwrap_err().to_string();
        assert!(error.starts_with(&format!("the variable {variable}: {in_file} = ")), "{error}");

        let error = file_refused(&format!("# comment\n\n{in_file} = {bad:?}\n"));
        assert!(error.starts_with(&format!("kvpool.toml:3: {in_file} = ")), "{error}");
    }
}

#[test]
fn unknown_keys_of_the_file_are_all_named() {
    let error = file_refused("size = 10\nblok_tokens = 3\n\n[pool]\nsize = 1\n");
    assert_eq!(
        error,
        "kvpool.toml:2: there is no key `blok_tokens`; did you mean `block_tokens`?\n\
         kvpool.toml:4: there is no key `pool`"
    );
    assert!(file_refused("config = \"other.toml\"").contains("there is no key `config`"));
}

#[test]
fn an_unknown_variable_is_a_warning() {
    let sources = Sources::new().environment(variables(&[
        ("KVPOOL_TRACES", "/x"),
        ("KVPOOL_MOONCAKE", "/x"),
        ("KVPOOL_SIZES", "3"),
    ]));
    let warnings = sources.load().unwrap().warnings;
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[1].contains("KVPOOL_SIZES") && warnings[1].ends_with("did you mean KVPOOL_SIZE?"));
}

#[cfg(unix)]
#[test]
fn a_variable_must_be_text() {
    use std::os::unix::ffi::OsStringExt;
    let bad = (OsString::from("KVPOOL_SIZE"), OsString::from_vec(vec![0xff]));
    let error = Sources::new().environment([bad]).load().unwrap_err().to_string();
    assert_eq!(error, "the variable KVPOOL_SIZE is not UTF-8");
}

#[test]
fn values_of_the_wrong_kind_are_refused() {
    for (value, reason) in [
        ("true", "a boolean"),
        ("[1]", "a list"),
        ("{ a = 1 }", "a table"),
        ("2020-01-01", "a date"),
        ("0x10", "not a decimal number"),
        ("1.5", "not a whole number"),
    ] {
        let error = file_refused(&format!("size = {value}"));
        assert!(error.contains(reason) && error.starts_with("kvpool.toml:1: size"), "{error}");
    }
    for text in ["tier = ['redis://u:secretpw@h']", "tier = 'redis://u:secretpw@h:port'"] {
        assert!(!file_refused(text).contains("secretpw"), "{text}");
        assert!(!format!("{:?}", Sources::new().text("x", text)).contains("secretpw"));
    }
    assert!(file_refused("peers = [1]").contains("a list of texts is needed"));
    assert!(file_refused("[peers]\nb = 1").contains("the address of b is no text"));
    assert!(file_refused("block-tokens = 1\nblock_tokens = 2").contains("twice"));
}

#[test]
fn a_file_that_is_missing_or_not_toml_is_named() {
    let error = refused(&[("config", "/nowhere/kvpool.toml")]);
    assert!(
        error.starts_with("cannot read the settings file /nowhere/kvpool.toml (named by --config): "),
        "{error}"
    );
    assert!(file_refused("size = 1\nsize 2\n").starts_with("kvpool.toml:2: not TOML: "));
    assert!(file_refused("size = 1\nsize = 2\n").starts_with("kvpool.toml:2: not TOML: "));
    let error = file_refused(&format!("# {}", "x".repeat(1 << 20)));
    assert!(error.ends_with("the maximum is 1048576"), "{error}");
    assert!(refused(&[("config", "/")]).contains("cannot read the settings file /"));
}

#[test]
fn keys_that_belong_together() {
    for (with, message) in [
        (&[("tls-cert", "c")][..], "--tls-cert: tls_cert needs tls_key as well"),
        (&[("tls-key", "k")], "--tls-key: tls_key needs tls_cert as well"),
        (&[("tls-ca", "a")], "--tls-ca: tls_ca needs tls_cert as well"),
        (&[("tls-cert", "c"), ("tls-key", "k")], "--tls-cert: tls_cert needs tls_ca as well"),
        (&[("migrate-below", "5")], "--migrate-below: migrate_below needs migrate_to as well"),
        (&[("migrate-to", "b")], "--migrate-to: migrate_to needs migrate_below as well"),
        (&[("migrate-below", "5"), ("migrate-to", "b")], "no peer has this name; there are none"),
        (
            &[("migrate-below", "20000"), ("migrate-to", "b"), ("peers", "b=localhost:1")],
            "the pool has 20000 blocks",
        ),
        (&[("admin", "0.0.0.0:1")], "--admin: admin needs token_file as well"),
        (&[("admin", "[::]:1")], "--admin: admin needs token_file as well"),
        (&[("admin", "https://127.0.0.1:1")], "--admin: admin needs tls_cert as well"),
        (&[("listen", "10.0.0.1:1")], "--listen: listen needs tls_cert as well"),
        (&[("peers", "b=gpu-node-2:7411")], "--peers: peers needs tls_cert as well"),
        (&[("peers", "a=localhost:1"), ("name", "a")], "a is the name of this node"),
        (&[("tier", REDIS)], "--tier: tier needs tier_namespace as well"),
        (&[("tier", REDIS), ("tier-namespace", "m")], "--tier: tier needs hash_key_file as well"),
        (&[("tier-namespace", "m")], "--tier-namespace: tier_namespace needs tier as well"),
        (&[("membership", ETCD), ("listen", "off")], "--membership: membership needs listen as well"),
        (&[("advertise", "a:1")], "--advertise: advertise needs membership as well"),
        (
            &[("membership", ETCD), ("listen", "0.0.0.0:1")],
            "--membership: membership needs advertise as well",
        ),
        (
            &[("membership", ETCD), ("advertise", "0.0.0.0:1")],
            "members cannot reach an address that stands for all",
        ),
        (
            &[("membership", ETCD), ("advertise", "a:0"), ("listen", "unix:/x")],
            "is a Unix socket and has no port",
        ),
        (
            &[("kv-events-replay", "tcp://*:1")],
            "--kv-events-replay: kv_events_replay needs kv_events as well",
        ),
        (&[("kv-events", "tcp://*:1"), ("kv-events-replay", "tcp://*:1")], "subscribers have this address"),
        (&[("kv-events", "tcp://*:1"), ("eviction", "off")], "eviction is off"),
        (&[("load", "conversations"), ("dtype", "int8")], "bytes of int8 cannot be compared"),
    ] {
        let error = refused(with);
        assert!(error.contains(message), "{with:?}: {error}");
    }
}

#[test]
fn a_password_of_a_tier_is_not_repeated() {
    for address in ["redis://:secret@host", "redis://user:secret@host:1/x", "http://user:secret@host:1"] {
        let error = refused(&[("tier", address)]);
        assert!(error.contains("tier = ") && error.contains("host") && !error.contains("secret"), "{error}");
    }
    for address in ["etcd://kv:secret@host/prod", "kv:secret@host:1/prod", "etcds://secret@host:1/prod"] {
        let error = refused(&[("membership", address)]);
        assert!(
            error.contains("membership = ") && error.contains("host") && !error.contains("secret"),
            "{error}"
        );
    }
}

#[test]
fn events_that_other_hosts_can_read_are_a_warning() {
    let warnings = |address| flags(&[("kv-events", address)]).load().unwrap().warnings;
    assert!(warnings("tcp://127.0.0.1:5557").is_empty());
    for open in ["tcp://*:5557", "tcp://10.0.0.1:5557"] {
        let [warning] = &warnings(open)[..] else { panic!("{open}") };
        assert!(warning.starts_with("--kv-events: other hosts can read"), "{warning}");
    }
}

#[test]
fn what_can_be_off_is_off() {
    let all = ["defrag-threshold", "eviction", "listen", "admin", "load", "tier", "membership", "kv-events"]
        .map(|name| (name, "off"));
    let settings = load(&all);
    assert_eq!((settings.pool.defrag, settings.pool.eviction, settings.load), (None, None, None));
    assert_eq!((settings.listen, settings.admin), (None, None));
    assert_eq!((settings.tier, settings.membership, settings.kv_events), (None, None, None));
}

#[test]
fn addresses_are_read_as_they_are_written() {
    for text in ["127.0.0.1:80", "[::1]:80", "gpu-node-2:7411", "unix:/run/kvpool.sock"] {
        assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
    }
    for (text, is_loopback) in [
        ("127.8.0.1:1", true),
        ("[::1]:1", true),
        ("[::ffff:127.0.0.1]:1", true),
        ("localhost:1", true),
        ("localhost.example:1", false),
        ("0.0.0.0:1", false),
        ("[::]:1", false),
    ] {
        assert_eq!(text.parse::<Address>().unwrap().is_loopback(), is_loopback, "{text}");
    }
    for bad in ["[::1:80", "[x]:80", ":80", "a:b", "a\nb:1", "a:+1x"] {
        assert!(bad.parse::<Address>().is_err(), "{bad:?}");
    }
}

#[test]
fn tokens_are_checked_and_compared_as_a_whole() {
    let token = Token::new("0123456789abcdef").unwrap();
    assert!(token.is(b"0123456789abcdef"));
    for wrong in [&b""[..], b"0123456789abcde", b"0123456789abcdeg", b"0123456789abcdef\0", &[b'0'; 300]] {
        assert!(!token.is(wrong), "{wrong:?}");
    }
    assert_eq!(format!("{token:?}"), "Token(..)");
    assert_eq!(token.expose(), "0123456789abcdef");
    assert!(matches!(Token::new("short"), Err(TokenError::Length { bytes: 5 })));
    assert!(matches!(Token::new(&"x".repeat(257)), Err(TokenError::Length { bytes: 257 })));
    assert!(matches!(Token::new("0123456789 abcdef"), Err(TokenError::Character { at: 11 })));
    let longest = "x".repeat(256);
    assert!(Token::new(&longest).unwrap().is(longest.as_bytes()));
    assert!(!Token::new(&longest).unwrap().is("x".repeat(257).as_bytes()));
}

#[cfg(unix)]
#[test]
fn a_token_that_others_can_read_is_a_warning() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    fs::write(&path, "a-token-of-some-length\n").unwrap();
    for (mode, warns) in [(0o600, false), (0o644, true)] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let loaded = flags(&[("token-file", path.to_str().unwrap())]).load().unwrap();
        assert_eq!(loaded.warnings.iter().any(|warning| warning.contains("chmod 600")), warns);
    }
    let error = refused(&[("token-file", "/nowhere/token")]);
    assert!(error.starts_with("--token-file: cannot read the token's file /nowhere/token"), "{error}");
    fs::write(&path, "short").unwrap();
    let path = path.to_str().unwrap();
    assert!(
        refused(&[("token-file", path)]).contains("line 1: a token has 16 to 256 characters; this one has 5")
    );
    let eight = "a-token-of-some-length\n\n".repeat(8);
    for (text, message) in [
        ("\n \n".to_owned(), "has 0 tokens, a line each; 1 to 8 are needed"),
        (format!("{eight}another-one-of-them"), "has 9 tokens"),
        ("a-token-of-some-length\nwith a space in it".to_owned(), "line 2: character 5 of the token"),
    ] {
        fs::write(path, text).unwrap();
        let error = refused(&[("token-file", path)]);
        assert!(error.starts_with(&format!("--token-file: {path}")) && error.contains(message), "{error}");
    }
    fs::write(path, eight).unwrap();
    assert_eq!(flags(&[("token-file", path)]).load().unwrap().settings.token.unwrap().all().len(), 8);
    let error = refused(&[("read-token-file", path)]);
    assert!(error.starts_with("--read-token-file: read_token_file needs token_file as well"), "{error}");
    let error = refused(&[("token-file", path), ("read-token-file", path)]);
    assert!(error.contains("one of its tokens is in token_file too"), "{error}");
    let error = refused(&[("token-file", path), ("hash-key-file", path)]);
    assert!(error.contains("--hash-key-file: ") && error.contains("more than one line"), "{error}");
}

/// The hash key is a separate key, or the first token.
#[test]
fn the_hash_key_outlives_the_token() {
    let folder = tempfile::tempdir().unwrap();
    let [one, two, key] = ["one", "two", "key"].map(|name| {
        let path = folder.path().join(name).to_str().unwrap().to_owned();
        fs::write(&path, format!("the-secret-of-the-file-{name}\n")).unwrap();
        path
    });
    let secret = |flags: &[(&str, &str)]| {
        let Loaded { settings, .. } = self::flags(flags).load().unwrap();
        settings.hash_key.map(|key| key.expose().to_owned())
    };
    assert_eq!(secret(&[]), None);
    assert_eq!(secret(&[("token-file", &one)]).unwrap(), "the-secret-of-the-file-one");
    for token in [&one, &two] {
        let flags = [("token-file", token.as_str()), ("hash-key-file", &key)];
        assert_eq!(secret(&flags).unwrap(), "the-secret-of-the-file-key");
    }
    assert_eq!(secret(&[("hash-key-file", &key)]).unwrap(), "the-secret-of-the-file-key");
}
