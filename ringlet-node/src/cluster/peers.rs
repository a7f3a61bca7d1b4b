//! What becomes of one other node, as this one sees it. Each change is said once.

use std::time::{Duration, Instant};

use super::Session;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Not heard of since this service began.
    Unknown,
    Joined,
    Unreachable,
    Left,
}

impl State {
    pub fn code(self) -> &'static str {
        match self {
            State::Unknown => "unknown",
            State::Joined => "joined",
            State::Unreachable => "unreachable",
            State::Left => "left",
        }
    }
}

pub struct Peer {
    state: State,
    why: String,
    since: Instant,
    /// Of its last session.
    incarnation: u64,
    session: Session,
    round_trip: Option<Duration>,
}

/// It is an older run of a node whose newer one was here: a process that should have ended, or a copy of its key.
#[derive(PartialEq, Eq, Debug)]
pub struct Older;

impl Peer {
    pub fn new() -> Peer {
        Peer {
            state: State::Unknown,
            why: String::new(),
            since: Instant::now(),
            incarnation: 0,
            session: Session::default(),
            round_trip: None,
        }
    }

    pub fn state(&self) -> State {
        self.state
    }

    pub fn why(&self) -> &str {
        &self.why
    }

    pub fn since(&self) -> Instant {
        self.since
    }

    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    pub fn round_trip(&self) -> Option<Duration> {
        self.round_trip
    }

    pub fn session(&self) -> Option<Session> {
        (self.state == State::Joined).then_some(self.session)
    }

    /// May this run of it have a session?
    pub fn admits(&self, incarnation: u64) -> Result<(), Older> {
        if incarnation < self.incarnation { Err(Older) } else { Ok(()) }
    }

    /// It has a session (`end` was called for the last one). True if it was started again since its last one.
    pub fn join(&mut self, incarnation: u64, session: Session) -> bool {
        debug_assert!(self.state != State::Joined);
        let restarted = self.incarnation != 0 && incarnation != self.incarnation;
        self.change(State::Joined, "");
        (self.incarnation, self.session, self.round_trip) = (incarnation, session, None);
        restarted
    }

    /// Its session is over. False if it had none: then nothing has changed.
    pub fn end(&mut self, state: State, why: &str) -> bool {
        let had = self.state == State::Joined;
        if had {
            self.change(state, why);
            self.round_trip = None;
        }
        had
    }

    pub fn answered_in(&mut self, time: Duration) {
        self.round_trip = Some(time);
    }

    fn change(&mut self, state: State, why: &str) {
        (self.state, self.since, self.why) = (state, Instant::now(), why.to_owned());
    }
}

#[cfg(test)]
impl Peer {
    /// It has been so for so long.
    pub fn was_so(&mut self, time: Duration) {
        self.since -= time;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_is_one_and_an_older_run_does_not_come_back() {
        let mut peer = Peer::new();
        assert!(!peer.end(State::Unreachable, "never heard"), "who was never here is not lost");
        assert!(!peer.join(5, [1; 16]));
        assert_eq!(peer.session(), Some([1; 16]));
        assert!(peer.end(State::Unreachable, "silent") && !peer.end(State::Left, "again"));
        assert_eq!(
            (peer.state(), peer.why(), peer.session()),
            (State::Unreachable, "silent", None)
        );
        assert!(!peer.join(5, [2; 16]), "the same run");
        assert!(peer.end(State::Left, ""));
        assert!(peer.join(6, [3; 16]), "another run");
        assert_eq!(peer.admits(5), Err(Older));
        assert_eq!((peer.admits(6), peer.admits(7)), (Ok(()), Ok(())));
    }
}
