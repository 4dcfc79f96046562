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
