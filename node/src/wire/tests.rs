use kvpool::transport::Tag;
use kvpool::{FrameId, Run};

use super::*;

fn header() -> Header {
    Header { version: WIRE_VERSION, role: Role::Data, has_token: true, incarnation: 7, nonce: [9; 32] }
}

#[test]
fn a_header_comes_back() {
    assert_eq!(Header::decode(&header().encode()), Ok(header()));
}

#[test]
fn a_header_of_another_version_names_both() {
    let theirs = Header { version: 9, ..header() };
    assert_eq!(Header::decode(&theirs.encode()), Err(WireError::Version { ours: WIRE_VERSION, theirs: 9 }));
}

/// No byte of a header is ignored: no other header decodes to the same value.
#[test]
fn no_byte_of_a_header_is_ignored() {
    for at in 0..HEADER {
        let mut bytes = header().encode();
        bytes[at] ^= 0x80;
        assert_ne!(Header::decode(&bytes), Ok(header()), "byte {at}");
    }
}

/// Except the spare fields of a node that states versions: a later release may use them.
#[test]
fn versions_are_a_part_of_the_nonce() {
    let (stated, versions) = (header().stating(Versions { min: 4, max: 300 }), Versions { min: 4, max: 300 });
    assert_eq!((header().stated(), stated.stated()), (None, Some(versions)));
    assert_eq!(stated.nonce[..24], header().nonce[..24]);
    assert_eq!(Header::decode(&stated.encode()), Ok(stated));
    for at in (12..16).chain(56..HEADER) {
        let mut bytes = stated.encode();
        bytes[at] = 1;
        assert_eq!(Header::decode(&bytes), Ok(stated), "byte {at}");
    }
    // Not a range: the nonce of a release that states none.
    assert_eq!(header().stating(Versions { min: 5, max: 4 }).stated(), None);
}

#[test]
fn the_common_version_is_the_greatest_of_both() {
    let of = |min, max| Versions { min, max };
    for a in 0..6 {
        for b in a..6 {
            for c in 0..6 {
                for d in c..6 {
                    let both = (a..=b).filter(|version| (c..=d).contains(version)).max();
                    assert_eq!(of(a, b).common(of(c, d)), both, "{a}..={b}, {c}..={d}");
                }
            }
        }
    }
}

#[test]
fn reasons_are_encoded_as_before_and_decoded_by_number() {
    let all = [
        (Denial::Links, &[0][..]),
        (Denial::Name, &[1]),
        (Denial::Messages { ours: 300, theirs: 4 }, &[2, 172, 2, 4]),
        (Denial::Stream, &[3]),
        (Denial::OwnName, &[4]),
        (Denial::SecondProcess, &[5]),
        (Denial::OlderProcess, &[6]),
        (Denial::Peers, &[7]),
    ];
    for (denial, bytes) in all {
        assert_eq!(encode(&denial, 9).unwrap(), bytes);
        assert_eq!(decode(bytes), Ok(denial));
    }
    assert_eq!(decode(&[8]), Ok(Denial::Unknown(8)));
    assert!(encode(&Denial::Unknown(8), 9).is_err(), "it is never sent");
}

#[test]
fn a_proof_depends_on_everything() {
    let (one, other) = (header().encode(), Header { nonce: [1; 32], ..header() }.encode());
    let secret = Secret::of_token(b"a token of sixteen");
    let proof = secret.prove(true, [&one, &other], &[3; 32]);
    assert_eq!(proof, secret.prove(true, [&one, &other], &[3; 32]));
    let others = [
        secret.prove(false, [&one, &other], &[3; 32]),
        secret.prove(true, [&other, &one], &[3; 32]),
        secret.prove(true, [&one, &one], &[3; 32]),
        secret.prove(true, [&one, &other], &[4; 32]),
        Secret::of_token(b"a token of sixteem").prove(true, [&one, &other], &[3; 32]),
        Proof::NONE,
    ];
    assert!(others.iter().all(|&other| other != proof));
    assert_eq!(format!("{secret:?}"), "Secret(..)");
}

#[test]
fn frames_are_bounded_before_they_are_read() {
    let head = FrameHead { kind: FrameKind::Message, length: 1000 };
    assert_eq!(FrameHead::decode(&head.encode(), 1000), Ok(head));
    let too_large = WireError::TooLarge { what: "a message", got: 1000, max: 999 };
    assert_eq!(FrameHead::decode(&head.encode(), 999), Err(too_large));
    assert!(FrameHead::decode(&[1, 0, 0, 0, 0, 0, 0, 0], 9).is_err(), "a heartbeat with contents");
    assert!(FrameHead::decode(&[0, 0, 0, 0, 2, 0, 0, 0], 9).is_err(), "an unknown kind");
}

#[test]
fn a_message_takes_up_its_frame() {
    let message = (7u32, String::from("seven"), vec![1u64, 2, 3]);
    let bytes = encode(&message, 100).unwrap();
    assert_eq!(decode::<(u32, String, Vec<u64>)>(&bytes), Ok(message.clone()));
    assert!(matches!(encode(&message, 5), Err(WireError::TooLarge { .. })));
    let longer = [&bytes[..], &[0]].concat();
    assert!(matches!(decode::<(u32, String, Vec<u64>)>(&longer), Err(WireError::Malformed { .. })));
    for end in 0..bytes.len() {
        assert!(decode::<(u32, String, Vec<u64>)>(&bytes[..end]).is_err());
    }
    // A list that claims 2^60 elements.
    let lie = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0f];
    assert!(decode::<Vec<u64>>(&lie).is_err());
}

#[test]
fn heads_of_items_come_back() {
    let run = Run { start: FrameId(5), len: 3 };
    let heads = [
        StreamHead::Item(ItemHead { item: 1 << 40, tag: Tag(9), run, form: Form::Planes, bytes: 4096 }),
        StreamHead::Ack(Ack { item: 77, status: ItemStatus::Overlap }),
    ];
    for head in heads {
        assert_eq!(StreamHead::decode(&head.encode()), Ok(head));
        for at in 0..ITEM_HEAD {
            let mut bytes = head.encode();
            bytes[at] ^= 0x40;
            assert_ne!(StreamHead::decode(&bytes), Ok(head), "byte {at}");
        }
    }
}

#[test]
fn runs_of_items_are_checked() {
    for run in [(0, 0), (u32::MAX, 1), (1, u32::MAX)] {
        let run = Run { start: FrameId(run.0), len: run.1 };
        let head = ItemHead { item: 0, tag: Tag(0), run, form: Form::Packed, bytes: 0 };
        assert!(StreamHead::decode(&StreamHead::Item(head).encode()).is_err(), "{run:?}");
    }
}

#[test]
fn names_are_checked() {
    assert!(["a", "gpu-node-2", "rack_1.Node"].iter().all(|name| check_name(name).is_ok()));
    assert!(["", "a b", "ä", "a/b", &"n".repeat(65)].iter().all(|name| check_name(name).is_err()));
}
