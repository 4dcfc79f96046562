//! Following the keys of members.

use std::time::Duration;

use etcd_client::{EventType, GetOptions, KeyValue, WatchOptions, WatchResponse};
use tokio::time::{Instant, sleep_until};

use super::connection::{Pauses, Trouble, call, connect};
use super::known::KnownMembers;
use crate::membership::member::Member;
use crate::membership::members::{ListSender, MemberList, publish};
use crate::settings::EtcdLocation;

/// Follows the members until nothing receives the lists any more.
pub(super) async fn follow(location: EtcdLocation, grace: Duration, lists: ListSender) {
    let mut follower = Watch { location, known: KnownMembers::new(grace), lists };
    let mut pauses = Pauses::new();
    let mut is_lost = false;
    let lists = follower.lists.clone();
    let forever = async {
        loop {
            let error = match follower.list().await {
                Err(error) => error,
                Ok(revision) => {
                    pauses.reset();
                    if std::mem::take(&mut is_lost) {
                        tracing::warn!(location = %follower.location, "the directory of members is in reach again");
                    }
                    follower.events(revision).await
                }
            };
            follower.publish(false);
            if !std::mem::replace(&mut is_lost, true) {
                let location = &follower.location;
                tracing::warn!(%location, %error, "the directory of members is out of reach; known members stay");
            }
            pauses.next().await;
        }
    };
    tokio::select! {
        () = lists.closed() => {}
        () = forever => {}
    }
}

struct Watch {
    location: EtcdLocation,
    known: KnownMembers,
    lists: ListSender,
}

/// The connection, at a revision.
struct Listed {
    client: etcd_client::Client,
    revision: i64,
}

impl Watch {
    /// Lists all members. Returns the revision of etcd at which it did.
    async fn list(&mut self) -> Result<Listed, Trouble> {
        let mut client = connect(&self.location).await?;
        let options = GetOptions::new().with_prefix();
        let answer = call(client.get(self.location.prefix(), Some(options))).await?;
        let revision = answer.header().map_or(0, |header| header.revision());
        let members = answer.kvs().iter().filter_map(|kv| self.member(kv)).collect();
        self.known.relist(members, Instant::now());
        self.publish(true);
        Ok(Listed { client, revision })
    }

    /// Follows the changes since a revision, until the stream is lost.
    async fn events(&mut self, listed: Listed) -> Trouble {
        let Listed { mut client, revision } = listed;
        let options = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
        let mut stream = match call(client.watch(self.location.prefix(), Some(options))).await {
            Ok(stream) => stream,
            Err(error) => return error,
        };
        loop {
            let expiry = self.known.next_expiry();
            tokio::select! {
                answer = stream.message() => match answer {
                    Ok(Some(answer)) => match self.apply(&answer) {
                        Ok(()) => {}
                        Err(error) => return error,
                    },
                    Ok(None) => return Trouble::Ended("closed".into()),
                    Err(error) => return error.into(),
                },
                () = sleep_until(expiry.unwrap_or_else(Instant::now)), if expiry.is_some() => {
                    self.known.expire(Instant::now());
                }
            }
            self.publish(true);
        }
    }

    /// Takes over changes. A stream that does not have them all any more is an error.
    fn apply(&mut self, answer: &WatchResponse) -> Result<(), Trouble> {
        if answer.canceled() || answer.compact_revision() > 0 {
            // The next list has what is missing.
            return Err(Trouble::Ended(format!(
                "{} (compacted at {})",
                answer.cancel_reason(),
                answer.compact_revision()
            )));
        }
        for event in answer.events() {
            let Some(kv) = event.kv() else { continue };
            match event.event_type() {
                EventType::Put => match self.member(kv) {
                    Some(member) => self.known.put(member),
                    None => continue,
                },
                EventType::Delete => match self.name(kv) {
                    Some(name) => self.known.remove(&name),
                    None => continue,
                },
            }
        }
        Ok(())
    }

    /// Returns the name in a key.
    fn name(&self, kv: &KeyValue) -> Option<String> {
        kv.key_str().ok()?.strip_prefix(&self.location.prefix()).map(str::to_owned)
    }

    /// Reads an entry; one that is malformed is reported and skipped.
    fn member(&self, kv: &KeyValue) -> Option<Member> {
        let name = self.name(kv)?;
        let member = Member::from_entry(kv.value()).and_then(|member| match member.name == name {
            true => Ok(member),
            false => Err(format!("it is of {}", member.name)),
        });
        member.inspect_err(|error| tracing::warn!(%error, ?name, "the entry of a member is malformed")).ok()
    }

    fn publish(&self, is_current: bool) {
        publish(&self.lists, MemberList { members: self.known.members(), is_current });
    }
}
