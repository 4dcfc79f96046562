use std::convert::Infallible;
use std::time::Duration;

use etcd_client::{Client, Compare, CompareOp, Error, PutOptions, Txn, TxnOp};
use tokio::time::sleep;

use super::connection::{Pauses, Servers, Trouble, call};
use crate::admin::Failures;
use crate::membership::joined::{JoinSender, JoinState, JoinStatus};
use crate::membership::member::Member;

/// Keeps the entry of a node until it leaves, or until nothing holds the entry.
pub(super) async fn keep(
    servers: Servers,
    member: Member,
    lease: Duration,
    (sender, failures): (JoinSender, Failures),
) {
    let JoinSender { state, mut leaving } = sender;
    let key = format!("{}{}", servers.location.prefix(), member.name);
    let seconds = lease.as_secs_f64().ceil() as i64;
    let mut entry = Entry { servers, key, member, seconds, held: None, state, failures };
    let mut pauses = Pauses::new();
    let left = tokio::select! {
        left = &mut leaving => left,
        never = entry.forever(&mut pauses) => match never {},
    };
    // After a drop without leaving, the entry expires.
    if left.is_ok() {
        entry.revoke().await;
    }
}

struct Entry {
    servers: Servers,
    key: String,
    member: Member,
    seconds: i64,
    held: Option<Held>,
    state: tokio::sync::watch::Sender<JoinState>,
    failures: Failures,
}

#[derive(Clone, Copy)]
struct Held {
    lease: i64,
    /// Time to live that etcd granted.
    ttl: Duration,
}

impl Entry {
    async fn forever(&mut self, pauses: &mut Pauses) -> Infallible {
        loop {
            let Err(error) = self.session(pauses).await;
            let reason = error.to_string();
            let waiting = JoinStatus::Waiting { reason };
            self.state.send_if_modified(|state| {
                let is_other = state.status != waiting;
                state.status = waiting;
                is_other
            });
            self.failures.note(format!("cannot join or renew at {}: {error}", self.servers.location));
            pauses.next().await;
        }
    }

    async fn session(&mut self, pauses: &mut Pauses) -> Result<Infallible, Trouble> {
        let mut client = self.servers.connect().await?;
        loop {
            let held = match self.held {
                Some(held) => held,
                None => self.enter(&mut client).await?,
            };
            let loss = self.renew(&mut client, held, pauses).await?;
            self.held = None;
            // The lease of a replaced entry may last long.
            let _ = call(client.lease_revoke(held.lease)).await;
            tracing::warn!(name = self.member.name, loss, "this node was no member any more; it joins again");
        }
    }

    async fn enter(&mut self, client: &mut Client) -> Result<Held, Trouble> {
        let found = call(client.get(self.key.as_str(), None)).await?;
        let found = found.kvs().first();
        let other = found.and_then(|kv| Member::from_entry(kv.value()).ok());
        // The address breaks ties of the start time.
        let rank = |member: &Member| (member.started_ms, member.address.to_string());
        if let Some(other) = other.filter(|other| rank(other) > rank(&self.member)) {
            let address = other.address.to_string();
            return Err(Trouble::Displaced { name: other.name, address });
        }
        let revision = found.map_or(0, |kv| kv.mod_revision());
        let grant = call(client.lease_grant(self.seconds, None)).await?;
        let held = Held { lease: grant.id(), ttl: Duration::from_secs(grant.ttl().max(1) as u64) };
        let is_unchanged = Compare::mod_revision(self.key.as_str(), CompareOp::Equal, revision);
        let options = PutOptions::new().with_lease(held.lease);
        let put = TxnOp::put(self.key.as_str(), self.member.to_entry(), Some(options));
        let answer = call(client.txn(Txn::new().when([is_unchanged]).and_then([put]))).await;
        if !answer.as_ref().is_ok_and(|answer| answer.succeeded()) {
            // Otherwise each attempt would leave a lease behind, for up to an hour.
            let _ = call(client.lease_revoke(held.lease)).await;
            answer?;
            return Err(Trouble::Raced { name: self.member.name.clone() });
        }
        self.held = Some(held);
        self.state.send_modify(|state| state.joins += 1);
        Ok(held)
    }

    /// Renews the lease until the entry is lost. Returns how it was lost.
    async fn renew(
        &mut self,
        client: &mut Client,
        held: Held,
        pauses: &mut Pauses,
    ) -> Result<&'static str, Trouble> {
        const EXPIRED: &str = "its lease expired";
        let (mut keeper, mut answers) = match call(client.lease_keep_alive(held.lease)).await {
            // The client's error for a time to live of 0.
            Err(Trouble::Client(Error::LeaseKeepAliveError(_))) => return Ok(EXPIRED),
            streams => streams?,
        };
        loop {
            let found = call(client.get(self.key.as_str(), None)).await?;
            let is_own = |kv: &etcd_client::KeyValue| kv.lease() == held.lease;
            if !found.kvs().first().is_some_and(is_own) {
                return Ok("its entry was deleted or replaced");
            }
            pauses.reset();
            self.state.send_if_modified(|state| {
                let is_other = state.status != JoinStatus::Joined;
                state.status = JoinStatus::Joined;
                is_other
            });
            sleep(held.ttl / 3).await;
            call(keeper.keep_alive()).await?;
            match call(answers.message()).await? {
                Some(answer) if answer.ttl() > 0 => {}
                Some(_) => return Ok(EXPIRED),
                None => return Err(Trouble::Ended("closed".into())),
            }
        }
    }

    async fn revoke(&self) {
        let Some(held) = self.held else { return };
        let revoked = async {
            let mut client = self.servers.connect().await?;
            call(client.lease_revoke(held.lease)).await
        };
        if let Err(error) = revoked.await {
            tracing::warn!(name = self.member.name, %error, "cannot leave; the entry expires");
        }
    }
}
