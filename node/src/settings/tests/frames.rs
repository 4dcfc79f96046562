use super::*;

#[test]
fn a_pool_of_frames_takes_the_keys_of_the_admin_interface() {
    let of = |with: &[(&str, &str)], number| flags(with).load_for_frames(number);
    let settings = of(&[("name", "engine"), ("tier", "off"), ("listen", "off")], 0).unwrap().settings;
    assert_eq!((&*settings.name, settings.listen), ("engine", None));
    assert_eq!(settings.admin, "127.0.0.1:7410".parse().ok());
    for (name, value) in [
        ("listen", "127.0.0.1:1"),
        ("peers", "b=127.0.0.1:1"),
        ("tier", REDIS),
        ("migrate-below", "5"),
        ("kv-events", "tcp://127.0.0.1:0"),
        ("membership", ETCD),
        ("hash-key-file", "a"),
        ("nixl", "auto"),
        ("tls-ca", "a"),
    ] {
        let error = of(&[(name, value)], 0).unwrap_err();
        assert!(matches!(error, SettingsError::OfSequences { key, .. } if key.name == name), "{error}");
        let told = format!("{} needs a pool with sequences and bytes", name.replace('-', "_"));
        assert!(error.to_string().contains(&told), "{error}");
    }
    let error = of(&[("size", "100")], 0).unwrap_err();
    assert!(matches!(error, SettingsError::OfProgram { .. }), "{error}");
    // Without peers, none needs an authority.
    let tls = [("tls-cert", "a"), ("tls-key", "b"), ("admin", "https://127.0.0.1:1")];
    assert!(of(&tls, 0).unwrap().settings.tls.is_some());
    let error = of(&[("admin", "0.0.0.0:1")], 0).unwrap_err().to_string();
    assert!(error.contains("admin needs token_file as well"), "{error}");
}

#[test]
fn pools_with_the_same_settings_are_told_apart() {
    let of = |admin: &str, number| {
        let settings = flags(&[("name", "engine"), ("admin", admin)]).load_for_frames(number)?.settings;
        Ok::<_, SettingsError>((settings.name, settings.admin.unwrap().to_string()))
    };
    for (admin, number, expected) in [
        ("127.0.0.1:80", 0, ("engine", "http://127.0.0.1:80")),
        ("127.0.0.1:80", 3, ("engine-3", "http://127.0.0.1:83")),
        ("127.0.0.1:0", 3, ("engine-3", "http://127.0.0.1:0")),
        ("unix:/run/a.sock", 2, ("engine-2", "unix:/run/a.sock.2")),
    ] {
        let (name, address) = of(admin, number).unwrap();
        assert_eq!((&*name, &*address), expected);
    }
    let error = of("127.0.0.1:65535", 1).unwrap_err().to_string();
    assert!(error.contains("no port is 1 above this one"), "{error}");
    let long = "a".repeat(64);
    let error = flags(&[("name", &long)]).load_for_frames(1).unwrap_err().to_string();
    assert!(error.contains("name = "), "{error}");
}

#[test]
fn a_file_may_be_named_by_flag_and_by_variable() {
    let (_folder, path) = file("name = \"engine\"\n");
    let by_flag = with_file(&path);
    let by_variable = Sources::new().environment(variables(&[("KVPOOL_CONFIG", path.to_str().unwrap())]));
    for sources in [by_flag, by_variable] {
        assert_eq!(sources.load_for_frames(0).unwrap().settings.name, "engine");
    }
}

#[test]
fn two_tokens_are_no_matter_of_hashes() {
    let (_folder, path) =
        file("the-first-token-of-two-tokens-that-are-valid\nthe-second-token-of-two-tokens-that-are-valid\n");
    let loaded = flags(&[("token-file", path.to_str().unwrap())]).load_for_frames(0).unwrap();
    assert!(!loaded.warnings.iter().any(|warning| warning.contains("hash")), "{:?}", loaded.warnings);
    assert!(loaded.settings.token.is_some());
}

/// Without an address of its own, a node has peers nevertheless.
#[test]
fn certificates_of_peers_are_checked_by_something() {
    let tls = [("listen", "off"), ("peers", "b=10.0.0.2:7411"), ("tls-cert", "a"), ("tls-key", "b")];
    assert!(refused(&tls).contains("peers need a certificate to be checked, or a token"));
}
