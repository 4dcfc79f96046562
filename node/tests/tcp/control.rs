//! Messages, and peers that are silent, slow or wrong on the control stream.

use std::time::{Duration, Instant};

use kvpool_node::transport::tcp::{Address, LinkError};
use kvpool_node::wire::{FRAME_HEAD, FrameHead, FrameKind, WireError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::*;

#[tokio::test(flavor = "multi_thread")]
async fn messages_arrive_in_order_and_before_the_end_of_the_link() {
    let a = silent(identity("a"), limits()).await;
    let b = listen(identity("b"), loopback(), limits()).await;
    let (here, there) = link(&a, &b).await;
    let sent = async {
        for number in 0..1000u32 {
            here.send(&(number, vec![number as u8; number as usize])).await.unwrap();
        }
        here.flush().await.unwrap();
        here.close();
        assert_eq!(here.send(&0).await, Err(LinkError::Closed));
        assert_eq!(here.cause(), Some(LinkError::Closed));
    };
    let received = async {
        for number in 0..1000u32 {
            let message: (u32, Vec<u8>) = there.recv().await.unwrap();
            assert_eq!(message, (number, vec![number as u8; number as usize]));
        }
        assert_eq!(there.recv::<u32>().await, Err(LinkError::Ended));
    };
    tokio::join!(sent, received);
}

/// A side that closes leaves heartbeats of the other unread, whose bytes must not cost messages.
#[tokio::test(flavor = "multi_thread")]
async fn messages_that_were_flushed_outlive_the_end_of_a_link() {
    let mut chatty = limits();
    chatty.heartbeat = Duration::from_millis(1);
    let a = silent(identity("a"), limits()).await;
    for address in [loopback(), Address::Unix(socket_path())] {
        let b = listen(identity("b"), address, chatty.clone()).await;
        for round in 0..50u32 {
            let (here, there) = link(&a, &b).await;
            for number in 0..200u32 {
                here.send(&(number, vec![round as u8; 1 << 10])).await.unwrap();
            }
            here.flush().await.unwrap();
            drop(here);
            tokio::time::sleep(Duration::from_millis(5)).await;
            for number in 0..200u32 {
                let message: Result<(u32, Vec<u8>), _> = there.recv().await;
                assert_eq!(message.map(|(number, _)| number), Ok(number), "round {round}");
            }
            assert_eq!(there.recv::<u32>().await, Err(LinkError::Ended));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_link_lives() {
    let a = silent(identity("a"), hasty_silence()).await;
    let b = listen(identity("b"), loopback(), hasty_silence()).await;
    let (here, there) = link(&a, &b).await;
    tokio::time::sleep(hasty_silence().silence * 2).await;
    assert_eq!((here.cause(), there.cause()), (None, None));
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_above_the_limit_are_refused_by_both_sides() {
    let mut small = limits();
    small.message_bytes = 100;
    let a = silent(identity("a"), limits()).await;
    let b = listen(identity("b"), loopback(), small).await;
    let (here, there) = link(&a, &b).await;
    let large = there.send(&vec![1u8; 101]).await;
    assert!(
        matches!(large, Err(LinkError::Wire(WireError::TooLarge { got: 103 | 102, max: 100, .. }))),
        "{large:?}"
    );
    assert_eq!(there.cause(), None, "a message that was not sent ends no link");
    // The other side stated its limit: the link is not lost for a message that it would not take.
    for _ in 0..3 {
        let large = here.send(&vec![1u8; 200]).await;
        assert!(matches!(large, Err(LinkError::Wire(WireError::TooLarge { max: 100, .. }))), "{large:?}");
    }
    assert_eq!(here.message_max(), 100);
    here.send(&7u8).await.unwrap();
    assert_eq!(there.recv::<u8>().await, Ok(7));
}

/// A peer that sends more than it was told to is cut, with the reason.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_above_the_limit_ends_the_link_of_its_sender() {
    let mut small = limits();
    small.message_bytes = 100;
    let b = listen(identity("b"), loopback(), small).await;
    let (mut raw, link) = Raw::link(&b, 1).await;
    raw.control.write_all(&frame(&[0; 101])).await.unwrap();
    let cause = link.closed().await;
    assert!(matches!(cause, LinkError::Wire(WireError::TooLarge { got: 101, max: 100, .. })), "{cause:?}");
}

/// A peer that reads nothing makes no queue grow: messages are refused, in bytes and in number.
#[tokio::test(flavor = "multi_thread")]
async fn messages_for_a_peer_that_does_not_read_are_bounded() {
    let mut few = limits();
    few.queued_bytes = 8 << 20;
    // Nothing is read, and no heartbeat is sent, until the end of the test.
    (few.item, few.silence) = (Duration::from_secs(60), Duration::from_secs(60));
    let b = listen(identity("b"), loopback(), few.clone()).await;
    let (_raw, link) = Raw::link(&b, 1).await;
    let (large, mut queued, mut refused) = (vec![0u8; 1 << 20], 0, 0);
    // The system's buffers take some: as long as those have room, the queue is emptied.
    while refused < 3 {
        match link.try_send(&large) {
            Ok(()) => {
                queued += 1;
                assert!(queued < 100, "a queue without an end");
            }
            Err(LinkError::Limit { what: "bytes of queued messages", .. }) => {
                refused += 1;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => panic!("{error}"),
        }
    }
    let mut small = 0;
    let full = loop {
        match link.try_send(&0u8) {
            Ok(()) => small += 1,
            Err(error) => break error,
        }
    };
    assert!(small <= few.queued_messages, "{small} messages");
    assert_eq!(full, LinkError::Limit { what: "queued messages", max: few.queued_messages });
    assert_eq!(link.cause(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_another_type_ends_the_link() {
    let a = silent(identity("a"), limits()).await;
    let b = listen(identity("b"), loopback(), limits()).await;
    let (here, there) = link(&a, &b).await;
    here.send(&7u8).await.unwrap();
    let received = there.recv::<(u64, String)>().await;
    assert!(matches!(received, Err(LinkError::Wire(WireError::Malformed { .. }))), "{received:?}");
    assert_eq!(Err(there.closed().await), received.map(drop));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_peer_is_cut() {
    let b = listen(identity("b"), loopback(), hasty_silence()).await;
    let (_raw, link) = Raw::link(&b, 1).await;
    let start = Instant::now();
    assert!(matches!(link.closed().await, LinkError::Slow { what: "send a heartbeat", .. }));
    assert!(start.elapsed() < Duration::from_secs(20));
}

/// A byte now and then is no progress: a frame has a deadline as a whole.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_message_is_cut() {
    let b = listen(identity("b"), loopback(), hasty_items()).await;
    let (mut raw, link) = Raw::link(&b, 1).await;
    let slow = async {
        for byte in frame(&[0; 100]) {
            if raw.control.write_all(&[byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let (cause, ()) = tokio::join!(link.closed(), slow);
    assert!(matches!(cause, LinkError::Slow { what: "complete a message", .. }), "{cause:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_does_not_read_is_cut() {
    let b = listen(identity("b"), loopback(), hasty_items()).await;
    let (mut raw, link) = Raw::link(&b, 1).await;
    let flood = async {
        loop {
            if let Err(error) = link.send(&vec![0u8; 1 << 20]).await {
                return error;
            }
        }
    };
    let beats = async {
        let beat = FrameHead { kind: FrameKind::Heartbeat, length: 0 }.encode();
        while raw.control.write_all(&beat).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let cause = tokio::select! { cause = flood => cause, () = beats => link.closed().await };
    assert!(matches!(cause, LinkError::Slow { what: "read a message", .. }), "{cause:?}");
}

/// A reader of this side that lags does not cost the link; the peer waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_inbox_holds_up_the_peer() {
    let mut few = hasty_silence();
    few.queued_messages = 2;
    let a = silent(identity("a"), hasty_silence()).await;
    let b = listen(identity("b"), loopback(), few).await;
    let (here, there) = link(&a, &b).await;
    for number in 0..20u32 {
        here.send(&number).await.unwrap();
    }
    tokio::time::sleep(hasty_silence().silence + Duration::from_millis(300)).await;
    for number in 0..20u32 {
        assert_eq!(there.recv::<u32>().await, Ok(number));
    }
    assert_eq!(there.cause(), None);
}

/// An announced length costs no memory, and noise ends the link.
#[tokio::test(flavor = "multi_thread")]
async fn garbage_on_the_control_stream_ends_the_link() {
    let b = listen(identity("b"), loopback(), limits()).await;
    let mut random = fastrand::Rng::with_seed(3);
    for round in 0..20 {
        let (mut raw, link) = Raw::link(&b, 1).await;
        let mut noise = vec![0; 64];
        random.fill(&mut noise);
        if round % 2 == 0 {
            noise[..FRAME_HEAD].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0]);
        } else {
            noise[4] |= 2;
        }
        raw.control.write_all(&noise).await.unwrap();
        let cause = link.closed().await;
        assert!(matches!(cause, LinkError::Wire(_)), "{cause:?}");
        // The peer finds its connections closed.
        let mut rest = Vec::new();
        let _ = raw.control.read_to_end(&mut rest).await;
    }
    assert_eq!(b.links(), 0);
}
