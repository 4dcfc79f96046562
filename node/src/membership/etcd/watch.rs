use std::time::Duration;

use etcd_client::{Client, Error, EventType, GetOptions, KeyValue, WatchOptions, WatchResponse};
use tokio::time::{Instant, sleep_until};

use super::connection::{Pauses, Servers, Trouble, call};
use super::known::{KnownMembers, MEMBERS_MAX};
use crate::admin::Failures;
use crate::membership::member::Member;
use crate::membership::members::{ListSender, MemberList, publish};

/// Initial number of keys per call: fewer if the answer exceeds the message limit.
const PAGE: usize = 256;

/// gRPC status code: the answer exceeds the message limit.
const TOO_LARGE: i32 = 11;

const NAMED_MAX: usize = 8;

/// Follows the members until all receivers of the lists are gone.
pub(super) async fn follow(servers: Servers, grace: Duration, lists: ListSender, failures: Failures) {
    let mut follower = Watch { servers, known: KnownMembers::new(grace), lists, failures };
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
                        tracing::warn!(location = %follower.servers.location, "the directory of members is in reach again");
                    }
                    follower.events(revision).await
                }
            };
            follower.publish(false);
            is_lost = true;
            let location = &follower.servers.location;
            follower.failures.note(format!("{location} is out of reach, and known members stay: {error}"));
            pauses.next().await;
        }
    };
    tokio::select! {
        () = lists.closed() => {}
        () = forever => {}
    }
}

/// Warns of members for which there is no room, and names the first of them.
fn warn_of(left_out: &[String], count: usize) {
    if count > 0 {
        let names = &left_out[..left_out.len().min(NAMED_MAX)];
        tracing::warn!(?names, count, max = MEMBERS_MAX, "the directory has more members than are followed");
    }
}

/// Returns the end of the range of keys with a prefix, whose last byte is a slash.
fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    end.iter_mut().last().into_iter().for_each(|last| *last += 1);
    end
}

struct Watch {
    servers: Servers,
    known: KnownMembers,
    lists: ListSender,
    failures: Failures,
}

struct Listed {
    client: etcd_client::Client,
    revision: i64,
}

impl Watch {
    async fn list(&mut self) -> Result<Listed, Trouble> {
        let mut client = self.servers.connect().await?;
        let (members, revision) = self.members(&mut client).await?;
        let left_out = self.known.relist(members, Instant::now());
        warn_of(&left_out, left_out.len());
        self.publish(true);
        Ok(Listed { client, revision })
    }

    /// Reads the entries of one revision in pages, at most [`MEMBERS_MAX`].
    async fn members(&self, client: &mut Client) -> Result<(Vec<Member>, i64), Trouble> {
        let prefix = self.servers.location.prefix().into_bytes();
        let (mut members, mut read, mut revision) = (Vec::new(), 0, 0);
        let (mut from, mut page) = (prefix.clone(), PAGE);
        loop {
            let limit = page.min(MEMBERS_MAX + 1 - read);
            let options = GetOptions::new().with_range(end_of(&prefix)).with_revision(revision);
            let answer = match call(client.get(from.clone(), Some(options.with_limit(limit as i64)))).await {
                Err(Trouble::Client(Error::GRpcStatus(status)))
                    if status.code() as i32 == TOO_LARGE && page > 1 =>
                {
                    page = page.div_ceil(4);
                    continue;
                }
                answer => answer?,
            };
            if revision == 0 {
                revision = answer.header().map_or(0, |header| header.revision());
            }
            let Some(last) = answer.kvs().last() else { return Ok((members, revision)) };
            let room = MEMBERS_MAX - read;
            members.extend(answer.kvs().iter().take(room).filter_map(|kv| self.member(kv)));
            read += answer.kvs().len();
            if read > MEMBERS_MAX {
                let left: Vec<_> = answer.kvs().iter().skip(room).filter_map(|kv| self.name(kv)).collect();
                // Those of this answer and after it.
                warn_of(&left, answer.count().max(0) as usize - room);
                return Ok((members, revision));
            }
            if !answer.more() {
                return Ok((members, revision));
            }
            from = [last.key(), &[0]].concat();
        }
    }

    /// Follows the changes since a revision, until the stream is lost.
    async fn events(&mut self, listed: Listed) -> Trouble {
        let Listed { mut client, revision } = listed;
        let options = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
        let mut stream = match call(client.watch(self.servers.location.prefix(), Some(options))).await {
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

    /// Applies changes. Fails if the stream no longer has all of them.
    fn apply(&mut self, answer: &WatchResponse) -> Result<(), Trouble> {
        if answer.canceled() || answer.compact_revision() > 0 {
            // The next list has the missing changes.
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
                    Some(member) => {
                        if let Err(name) = self.known.put(member) {
                            warn_of(&[name], 1);
                        }
                    }
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

    fn name(&self, kv: &KeyValue) -> Option<String> {
        kv.key_str().ok()?.strip_prefix(&self.servers.location.prefix()).map(str::to_owned)
    }

    /// Reads an entry; reports and skips a malformed one.
    fn member(&self, kv: &KeyValue) -> Option<Member> {
        let name = self.name(kv)?;
        let member = Member::from_entry(kv.value()).and_then(|member| match member.name == name {
            true => Ok(member),
            false => Err(format!("it is of {}", member.name)),
        });
        let malformed =
            |error: &String| self.failures.note(format!("the entry of {name:?} is malformed: {error}"));
        member.inspect_err(malformed).ok()
    }

    fn publish(&self, is_current: bool) {
        publish(&self.lists, MemberList { members: self.known.members(), is_current });
    }
}
