//! Endpoints beyond the network namespace, by way of the node service (`crate::native::hosts`): one that is offered as `:orders` on the node `b` is
//! found as `b:orders`. On two hosts the services carry what is said; on one they are out of it, once the two have met.
//!
//! Each pair has a channel of its own, with a lane at each end (`wire`). By a name that it makes up itself either end knows the other one.

use super::lane::{Lane, Mapping};
use super::message::Error;
use super::name::Name;
use super::state::{Command, Endpoint, Shared, own, raw};
use super::wire::Wire;
use crate::guarded::Guarded;
use crate::native::bell::Deadline;
use crate::native::carried::{Beginning, Joined, Offer, Port};
use crate::native::{self, Kind, Timeout, hosts};
use ringlet_core::active::layout::SEGMENT_BYTES;
use ringlet_linux::map;
use std::sync::Arc;
use std::time::Duration;

/// How long the node service may take to answer; and if an offer is renewed, for which nobody waits.
const OFFERED_IN: Duration = Duration::from_secs(10);
const RENEWED_IN: Duration = Duration::from_millis(100);

/// The channel: any one parcel finds room (`wire`).
const OFFER: Offer =
    Offer { kind: Kind::ActiveMessages as u32, slot_count: 256, ring_bytes: 512 << 10 };

impl Endpoint {
    /// Offers the endpoint, by a name that begins with a colon, to all in other network namespaces of this host and on other hosts of the cluster
    /// whom the node service's policy admits; they `find` it. Who knows its tag may send to it then, and it to them. It is offered until it is
    /// freed, anew when the service has been started again. Fails with EADDRINUSE if this user offers one of that name already, and with
    /// `Unreachable` where there is no node service.
    pub fn offer(&self, name: &str) -> Result<(), Error> {
        let service = hosts::offered(name).ok_or(Error::BadArgument)?;
        self.enter()?.0.outside()?;
        let endpoint = self.itself()?;
        let mut deadline = Deadline::new(Some(OFFERED_IN));
        let node = hosts::node().map_err(Error::Node)?;
        let line = hosts::offer(service, &node, &mut deadline).map_err(Error::Node)?;
        self.shared.offered.lock().push(self.id);
        self.shared.command(Command::Offer {
            endpoint,
            name: service.to_owned(),
            node: node.into(),
            line,
        });
        Ok(())
    }

    /// The name of the endpoint that is offered as `NODE:SERVICE`, waiting for that to be offered if need be. It is good for this endpoint alone,
    /// until the two are apart (what is sent comes back as `Unreachable` then): map it. Who is found knows this one by the source of its messages,
    /// and may map that.
    pub fn find(&self, name: &str, timeout: Timeout) -> Result<Name, Error> {
        if !hosts::is_of_node(name) {
            return Err(Error::BadArgument);
        }
        self.enter()?.0.outside()?;
        let port = call(name, &mut Deadline::new(timeout)).map_err(Error::Node)?;
        self.join(port)
    }

    pub(super) fn join(&self, port: Port) -> Result<Name, Error> {
        let (endpoint, lane) = (self.itself()?, self.shared.lane_over(port)?);
        let (guard, _) = self.enter()?;
        guard.outside()?;
        let state = self.state(&guard).ok_or(Error::Freed)?;
        if !guard.attach(&endpoint, &lane) {
            return Err(Error::NoResource);
        }
        state.know(&lane);
        let peer = lane.peer;
        self.shared.command(Command::Carry { endpoint: endpoint.clone(), lane });
        Ok(peer)
    }

    fn itself(&self) -> Result<Arc<Endpoint>, Error> {
        self.shared.endpoints.lock().get(&self.id).cloned().ok_or(Error::Freed)
    }
}

impl Shared {
    fn lane_over(&self, port: Port) -> Result<Arc<Lane>, Error> {
        let made = map::sealed_memfd(c"ringlet-am", SEGMENT_BYTES, 0);
        let segment = own(made.map_err(|_| Error::NoResource)?);
        let segment = Mapping::of_rings(raw(&segment), SEGMENT_BYTES).ok_or(Error::NoResource)?;
        let peer = Name::of_somebody_afar().ok_or(Error::NoResource)?;
        Ok(Arc::new(Lane::over(Wire::new(port), self.lane_id(), peer, segment)))
    }

    /// A lane to who has come by the socket.
    pub fn welcome(&self, socket: Guarded) -> Result<Arc<Lane>, Error> {
        self.lane_over(Beginning(socket).welcome(OFFER).map_err(Error::Node)?)
    }
}

/// Where callers come, again.
pub(super) fn renew(service: &str, node: &hosts::Node) -> Option<Guarded> {
    hosts::offer(service, node, &mut Deadline::new(Some(RENEWED_IN))).ok()
}

fn call(name: &str, deadline: &mut Deadline) -> Result<Port, native::Error> {
    let mut begins = Beginning(hosts::call(name, deadline)?);
    loop {
        match begins.join()? {
            Joined::NotYet(again) => {
                deadline.await_input(again.socket())?;
                begins = again;
            }
            Joined::Here(offer, port) if offer.kind == OFFER.kind => return Ok(*port),
            Joined::Here(..) => return Err(native::Error::OtherKind),
        }
    }
}
