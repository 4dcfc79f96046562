use std::io;
use std::sync::{Arc, OnceLock};

use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Mutex as AsyncMutex, mpsc, oneshot};
use tokio::task::JoinHandle;

use super::address::Address;
use super::control::pause;
use super::error::LinkError;
use super::handshake::{self, within};
use super::link::{Connections, Link};
use super::link_state::Peer;
use super::listener::{Accepted, Listener, SocketFile, bind_unix};
use super::pending::{Entered, Pending};
use super::random::random;
use super::resolve::{Resolve, SystemResolver, resolve};
use super::settings::{Identity, ListenSettings, PeerSettings, Token};
use super::socket::Socket;
use super::table::{Expected, Shared, Slot};
use super::tls::{self, Tls};
use crate::wire::{
    Denial, Header, Hello, Limits, Role, StreamPlace, Versions, Welcome, WireError, check_name,
};

/// The network side of a node: listens, and connects to peers.
///
/// Dropping it stops listening; established links remain.
#[derive(Debug)]
pub struct Endpoint {
    shared: Arc<Shared>,
    resolver: Arc<dyn Resolve>,
    addresses: Vec<Address>,
    accepted: AsyncMutex<mpsc::Receiver<Result<Link, Refused>>>,
    listeners: Vec<JoinHandle<()>>,
    /// Removed with the endpoint.
    _files: Vec<SocketFile>,
}

pub(crate) struct Refused {
    pub(crate) error: LinkError,
    /// Address of the peer, or of the Unix socket.
    pub(crate) address: Address,
    /// The name that it claims, if it sent one.
    pub(crate) peer: Option<String>,
}

impl Endpoint {
    /// Binds all addresses (a name's first), and accepts connections on the current runtime.
    ///
    /// # Errors
    /// [`LinkError::PlainText`], [`LinkError::Unauthenticated`], [`LinkError::AddressInUse`],
    /// [`LinkError::Io`]. Then no address is bound.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub async fn bind(
        settings: ListenSettings,
        identity: Identity,
        limits: Limits,
    ) -> Result<Self, LinkError> {
        let (resolver, mut wanted) = (SystemResolver::default(), Vec::new());
        for address in &settings.addresses {
            wanted.extend(resolve(&resolver, address).await?.into_iter().next());
        }
        for address in &wanted {
            identity.check(address, true)?;
        }
        let (sender, accepted) = mpsc::channel(limits.handshakes.max(1));
        let pending = Pending::new(limits.handshakes);
        let shared = Arc::new(Shared::new(identity, limits));
        let (mut addresses, mut sockets, mut bound) = (Vec::new(), Vec::new(), Vec::new());
        for address in &wanted {
            let failed = |error: io::Error| listen_error(address, &error);
            match address {
                Address::Named { .. } => unreachable!("a name is resolved before"),
                Address::Tcp(wanted) => {
                    let listener = TcpListener::bind(wanted).await.map_err(failed)?;
                    addresses.push(Address::Tcp(listener.local_addr().map_err(failed)?));
                    bound.push(Listener::Tcp(listener));
                }
                Address::Unix(path) => {
                    let (listener, file) = bind_unix(path).map_err(failed)?;
                    bound.push(Listener::Unix(UnixListener::from_std(listener).map_err(failed)?));
                    sockets.push(file);
                    addresses.push(address.clone());
                }
            }
        }
        let listen = |(listener, address): (_, &Address)| {
            let acceptor =
                Acceptor { shared: shared.clone(), accepted: sender.clone(), pending: pending.clone() };
            tokio::spawn(acceptor.listen(listener, address.clone()))
        };
        let listeners = bound.into_iter().zip(&addresses).map(listen).collect();
        let (resolver, accepted) = (Arc::new(resolver), AsyncMutex::new(accepted));
        Ok(Self { shared, resolver, addresses, accepted, listeners, _files: sockets })
    }

    /// Sets the resolver of peers' names; by default the system's.
    #[must_use]
    pub fn resolver(mut self, resolver: Arc<dyn Resolve>) -> Self {
        self.resolver = resolver;
        self
    }

    /// Returns the addresses, with the ports that the system selected.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Returns this node's identity.
    pub fn identity(&self) -> Arc<Identity> {
        self.shared.identity()
    }

    /// Replaces certificates and token for new connections. Established links stay.
    ///
    /// # Errors
    /// [`LinkError::PlainText`], [`LinkError::Unauthenticated`] for an address on which this
    /// endpoint listens. Then nothing is replaced.
    pub fn set_access(&self, tls: Option<Tls>, token: Option<Token>) -> Result<(), LinkError> {
        let mut identity = Identity::clone(&self.shared.identity());
        (identity.tls, identity.token) = (tls.map(Arc::new), token);
        for address in &self.addresses {
            identity.check(address, true)?;
        }
        self.shared.set_identity(identity);
        self.warn_if_open();
        Ok(())
    }

    /// Warns if peers that link to a port are not authenticated.
    pub(crate) fn warn_if_open(&self) {
        let identity = self.shared.identity();
        let is_port = |address: &&Address| !matches!(address, Address::Unix(_));
        if identity.tls.is_none()
            && identity.token.is_none()
            && let Some(address) = self.addresses.iter().find(is_port)
        {
            tracing::warn!(
                %address,
                "any user of this host can link to this node under any name: set a token (token_file), or \
                 certificates of both sides (tls_ca), or listen at a Unix socket (unix:PATH)"
            );
        }
    }

    /// Reserves a place among the links for each of these peers, at most half of all places.
    pub fn keep_places(&self, peers: impl IntoIterator<Item = String>) {
        self.shared.table.lock().configured = peers.into_iter().collect();
    }

    /// Returns the limits.
    pub fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    /// Connects to a peer. Resolves a name now, and tries its addresses in order.
    ///
    /// # Errors
    /// Any [`LinkError`]. Then no connection is left.
    pub async fn connect(&self, peer: &PeerSettings) -> Result<Link, LinkError> {
        let mut last = LinkError::Closed;
        for address in resolve(&*self.resolver, &peer.address).await? {
            self.shared.identity().check(&address, false)?;
            let peer = PeerSettings { address, ..peer.clone() };
            match within(self.shared.limits.handshake, "complete the handshake", self.dial(&peer)).await {
                // It does not answer, or not in time: another address may.
                Err(error @ (LinkError::Io { .. } | LinkError::Slow { .. })) => last = error,
                result => return result,
            }
        }
        Err(last)
    }

    async fn dial(&self, peer: &PeerSettings) -> Result<Link, LinkError> {
        let limits = &self.shared.limits;
        let place = StreamPlace::Control { streams: limits.streams.clamp(1, limits.streams_max.max(1)) };
        let (control, their, link, streams) = self.open(peer, place).await?;
        let slot = Slot::take(&self.shared, &their.name)?;
        let mut data = Vec::with_capacity(streams.into());
        for index in 0..streams {
            let (socket, other, ..) = self.open(peer, StreamPlace::Data { link, index }).await?;
            if other != their {
                return Err(LinkError::OtherPeer { expected: their.name, got: other.name });
            }
            data.push(socket);
        }
        let connections = Connections { control, data, address: peer.address.clone() };
        Ok(Link::start(their, limits.clone(), link, connections, slot))
    }

    /// Opens one connection of a link. Also returns the peer, the link and its data streams.
    async fn open(
        &self,
        peer: &PeerSettings,
        place: StreamPlace,
    ) -> Result<(Socket, Peer, u128, u16), LinkError> {
        let identity = &*self.shared.identity();
        let mut socket = handshake::open(identity, peer).await?;
        let role = if matches!(place, StreamPlace::Control { .. }) { Role::Control } else { Role::Data };
        let header = handshake::introduce(&mut socket, identity, role).await?;
        let (ours, versions) = (identity.messages, header.stated());
        let theirs = versions.unwrap_or(Versions::UNSTATED);
        let common = ours.common(theirs);
        let (name, messages, fingerprint) =
            (identity.name.clone(), common.unwrap_or(ours.max), identity.fingerprint);
        let statement = identity.statement(&self.shared.limits);
        handshake::tell(&mut socket, &Hello { name, messages, fingerprint, statement, place }).await?;
        if common.is_none() {
            return Err(LinkError::Versions { ours, theirs });
        }
        let (name, told, fingerprint, statement, link, streams) =
            match handshake::hear(&mut socket, &header).await? {
                Welcome::Denied(Denial::OwnName) => {
                    return Err(LinkError::OwnName { name: identity.name.clone() });
                }
                Welcome::Denied(denial) => return Err(LinkError::Denied(denial)),
                Welcome::Accepted { name, messages, fingerprint, statement, link, streams } => {
                    (name, messages, fingerprint, statement, link, streams)
                }
            };
        check_name(&name)?;
        if told != messages {
            let what = "the version of the messages";
            return Err(WireError::Invalid { what, got: told.into() }.into());
        }
        if name == identity.name {
            return Err(LinkError::OwnName { name });
        }
        if name != peer.name {
            return Err(LinkError::OtherPeer { expected: peer.name.clone(), got: name });
        }
        let asked = if let StreamPlace::Control { streams } = place { streams } else { u16::MAX };
        if !(1..=asked).contains(&streams) {
            let what = "the number of data streams";
            return Err(WireError::Invalid { what, got: streams.into() }.into());
        }
        let incarnation = header.incarnation;
        let peer = Peer { name, incarnation, messages, versions, fingerprint, statement };
        Ok((socket, peer, link, streams))
    }

    /// Waits for the next link that a peer establishes.
    ///
    /// # Errors
    /// Why a connection was refused; the next call waits for another one. If errors are not
    /// awaited, the newest are dropped.
    pub async fn accept(&self) -> Result<Link, LinkError> {
        let next = self.next().await.ok_or(LinkError::Closed)?;
        next.map_err(|refused| refused.error)
    }

    /// Like [`accept`](Self::accept); `None` if no further link can come.
    pub(crate) async fn next(&self) -> Option<Result<Link, Refused>> {
        self.accepted.lock().await.recv().await
    }

    /// Returns the number of established links.
    pub fn links(&self) -> usize {
        self.shared.table.lock().links.values().sum()
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.listeners.iter().for_each(JoinHandle::abort);
    }
}

fn listen_error(address: &Address, error: &io::Error) -> LinkError {
    if error.kind() == io::ErrorKind::AddrInUse {
        return LinkError::AddressInUse { address: address.clone() };
    }
    LinkError::Io { what: format!("listen on {address}"), kind: error.kind(), reason: error.to_string() }
}

#[derive(Clone)]
struct Acceptor {
    shared: Arc<Shared>,
    accepted: mpsc::Sender<Result<Link, Refused>>,
    /// Unauthenticated connections.
    pending: Arc<Pending>,
}

impl Acceptor {
    async fn listen(self, listener: Listener, address: Address) {
        loop {
            let connection = match listener.accept().await {
                Ok(connection) => connection,
                // Out of descriptors, for example: other connections have to end first.
                Err(error) => {
                    let error = LinkError::io("accept a connection", error);
                    self.report(Refused { error, address: address.clone(), peer: None });
                    pause().await;
                    continue;
                }
            };
            let entered = self.pending.enter(connection.source());
            let from = connection.address(&address);
            tokio::spawn(self.clone().meet((connection, from), entered));
        }
    }

    /// Reports a refusal, unless too many are unread.
    fn report(&self, refused: Refused) {
        let _ = self.accepted.try_send(Err(refused));
    }

    async fn meet(self, (connection, address): (Accepted, Address), entered: Entered) {
        let (time, max) = (self.shared.limits.handshake, self.shared.limits.handshakes);
        // From the greeting on it has a name, and no longer takes the place of an unknown one.
        let (greeted, is_greeted) = oneshot::channel();
        let name = OnceLock::new();
        let admit = self.admit(connection, &address, &name, greeted);
        let admit = within(time, "complete the handshake", admit);
        let admitted = tokio::select! {
            biased;
            admitted = admit => admitted,
            () = entered.displaced(is_greeted, time) => {
                Err(LinkError::Limit { what: "connections without a handshake", max })
            }
        };
        match admitted {
            Ok(None) => {}
            Ok(Some(link)) => drop(self.accepted.send(Ok(link)).await),
            Err(error) => self.report(Refused { error, address, peer: name.into_inner() }),
        }
    }

    /// Authenticates a connection, and notes its name. Returns a link for a control stream.
    async fn admit(
        &self,
        connection: Accepted,
        address: &Address,
        name: &OnceLock<String>,
        greeted: oneshot::Sender<()>,
    ) -> Result<Option<Link>, LinkError> {
        let identity = &*self.shared.identity();
        let mut socket = match connection {
            Accepted::Tcp(stream, _) => tls::accept(identity.tls.as_deref(), stream).await?,
            Accepted::Unix(stream) => {
                handshake::same_user(&stream)?;
                Socket::Unix(stream)
            }
        };
        let header = handshake::receive(&mut socket, identity).await?;
        let hello: Hello = handshake::hear(&mut socket, &header).await?;
        let _ = greeted.send(());
        if check_name(&hello.name).is_ok() {
            let _ = name.set(hello.name.clone());
        }
        let certificates = socket.certificates();
        let is_misnamed = certificates.is_some_and(|certificates| !tls::is_named(certificates, &hello.name));
        if hello.check().is_err() || is_misnamed {
            self.deny(socket, Denial::Name).await;
            return Err(hello.check().err().map_or_else(handshake::misnamed, LinkError::Wire));
        }
        let (ours, theirs) = (identity.messages, header.stated().unwrap_or(hello.messages.into()));
        let common = ours.common(theirs);
        if common != Some(hello.messages) {
            let denial = Denial::Messages { ours: hello.messages, theirs: common.unwrap_or(ours.max) };
            self.deny(socket, denial).await;
            return Err(match common {
                None => LinkError::Versions { ours, theirs },
                Some(_) => LinkError::Denied(denial),
            });
        }
        if hello.name == identity.name {
            self.deny(socket, Denial::OwnName).await;
            return Err(LinkError::OwnName { name: hello.name });
        }
        match (hello.place, header.role) {
            (StreamPlace::Control { streams }, Role::Control) => {
                self.control(socket, (&header, address), hello, streams).await.map(Some)
            }
            (StreamPlace::Data { link, index }, Role::Data) => {
                self.data(socket, &header, hello, (link, index)).await.map(|()| None)
            }
            (_, role) => {
                let what = "the role of a connection";
                Err(WireError::Invalid { what, got: role as u64 }.into())
            }
        }
    }

    async fn deny(&self, mut socket: Socket, denial: Denial) {
        // The peer may be gone; the refusal is reported here in any case.
        let _ = handshake::tell(&mut socket, &Welcome::Denied(denial)).await;
    }

    fn welcome(&self, messages: u16, link: u128, streams: u16) -> Welcome {
        let identity = self.shared.identity();
        let Identity { name, fingerprint, .. } = &*identity;
        Welcome::Accepted {
            name: name.clone(),
            messages,
            fingerprint: *fingerprint,
            statement: identity.statement(&self.shared.limits),
            link,
            streams,
        }
    }

    /// Establishes a link once its data streams have arrived.
    async fn control(
        &self,
        mut control: Socket,
        (header, address): (&Header, &Address),
        hello: Hello,
        streams: u16,
    ) -> Result<Link, LinkError> {
        let limits = &self.shared.limits;
        let key = (hello.name.clone(), header.incarnation);
        let slot = match Slot::take(&self.shared, &key.0) {
            Ok(slot) => slot,
            Err(error) => {
                self.deny(control, Denial::Links).await;
                return Err(error);
            }
        };
        let streams = streams.min(limits.streams_max.max(1));
        let link = u128::from_le_bytes(random()?);
        let (sender, mut arriving) = mpsc::channel(streams.into());
        let expected = Expected::note(&self.shared, link, key, sender);
        handshake::tell(&mut control, &self.welcome(hello.messages, link, streams)).await?;
        let mut data: Vec<Option<Socket>> = (0..streams).map(|_| None).collect();
        while data.iter().any(Option::is_none) {
            let Some((index, socket)) = arriving.recv().await else {
                let max = limits.handshakes;
                return Err(LinkError::Limit { what: "links without their data streams", max });
            };
            match data.get_mut(usize::from(index)) {
                Some(place @ None) => *place = Some(socket),
                _ => {
                    let what = "the number of a data stream";
                    return Err(WireError::Invalid { what, got: index.into() }.into());
                }
            }
        }
        drop(expected);
        let peer = Peer {
            name: hello.name,
            incarnation: header.incarnation,
            messages: hello.messages,
            versions: header.stated(),
            fingerprint: hello.fingerprint,
            statement: hello.statement,
        };
        let data = data.into_iter().flatten().collect();
        let connections = Connections { control, data, address: address.clone() };
        Ok(Link::start(peer, limits.clone(), link, connections, slot))
    }

    /// Passes a data stream to the link that waits for it.
    async fn data(
        &self,
        mut socket: Socket,
        header: &Header,
        hello: Hello,
        (link, index): (u128, u16),
    ) -> Result<(), LinkError> {
        let (key, messages) = ((hello.name, header.incarnation), hello.messages);
        let waiting = {
            let table = self.shared.table.lock();
            table
                .waiting
                .get(&link)
                .filter(|waiting| waiting.peer == key)
                .map(|waiting| waiting.streams.clone())
        };
        let Some(streams) = waiting else {
            self.deny(socket, Denial::Stream).await;
            return Err(LinkError::Denied(Denial::Stream));
        };
        handshake::tell(&mut socket, &self.welcome(messages, link, 1)).await?;
        // Fails if the link gave up meanwhile; the peer then finds its connection closed.
        streams.send((index, socket)).await.map_err(|_| LinkError::Denied(Denial::Stream))
    }
}
