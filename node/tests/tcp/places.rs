//! Places among the links, the file of a Unix socket, and TLS on one side only.

use std::os::unix::net::UnixListener;

use kvpool_node::transport::tcp::{Address, LinkError};
use kvpool_node::wire::Denial;

use crate::support::*;

#[tokio::test(flavor = "multi_thread")]
async fn strangers_leave_places_for_configured_peers() {
    let mut few = limits();
    few.links = 6;
    let b = listen(identity("b"), loopback(), few).await;
    let configured = |names: &[&str]| b.keep_places(names.iter().map(|&name| name.to_owned()));
    configured(&["friend", "other", "b-2", "b-3", "b-4"]);
    let (mut links, mut refusals) = (Vec::new(), 0);
    for number in 0..6 {
        let stranger = silent(identity(&format!("stranger-{number}")), limits()).await;
        let peer = peer_at("b", &b);
        let (here, there) = tokio::join!(stranger.connect(&peer), b.accept());
        match here {
            Ok(here) => links.push((here, there.unwrap())),
            Err(error) => {
                assert_eq!(error, LinkError::Denied(Denial::Links));
                assert_eq!(there.unwrap_err(), LinkError::Limit { what: "links", max: 6 });
                refusals += 1;
            }
        }
    }
    assert_eq!((links.len(), refusals), (3, 3), "half of the places are the most that is kept");
    for name in ["friend", "other", "friend"] {
        links.push(link(&silent(identity(name), limits()).await, &b).await);
    }
    assert_eq!(b.links(), 6);
    // A reload: who is no peer any more is a stranger; a place that is free is anyone's.
    configured(&["another"]);
    drop(links.drain(..2));
    until("two links ended", || b.links() == 4).await;
    links.push(link(&silent(identity("other"), limits()).await, &b).await);
    let stranger = silent(identity("stranger"), limits()).await;
    let (here, _) = refused(&stranger, &b, &peer_at("b", &b)).await;
    assert_eq!(here, LinkError::Denied(Denial::Links));
    links.push(link(&silent(identity("another"), limits()).await, &b).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_socket_of_another_process_is_left_alone() {
    let path = socket_path();
    let first = listen(identity("b"), Address::Unix(path.clone()), limits()).await;
    std::fs::remove_file(&path).unwrap();
    let second = UnixListener::bind(&path).unwrap();
    drop(first);
    assert!(path.exists(), "it is not the file of the first one");
    drop(second);
    std::fs::remove_file(path).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_on_one_side_is_named_on_both() {
    let authority = Authority::new();
    for is_connector_plain in [true, false] {
        let (mut a, mut b) = (identity("a"), identity("b"));
        let (mut plain, mut secure) = (LinkError::PeerExpectsTls, LinkError::PeerSpeaksPlainText);
        if is_connector_plain {
            b = b.tls(authority.mutual("b"));
        } else {
            a = a.tls(authority.mutual("a"));
            std::mem::swap(&mut plain, &mut secure);
        }
        let (a, b) = (silent(a, limits()).await, listen(b, loopback(), limits()).await);
        for _ in 0..20 {
            let (here, there) = refused(&a, &b, &peer_at("b", &b)).await;
            assert_eq!((&here, there.as_ref()), (&plain, Some(&secure)));
        }
    }
}
