//! What ends a transport: the other node has said what none of ours says.

#[derive(thiserror::Error, Clone, PartialEq, Eq, Debug)]
pub enum Error {
    #[error("a message of an unknown kind")]
    Kind,
    #[error("a frame that is longer than its message, or than any")]
    Frame,
    #[error("message {0} is beyond the window")]
    Sequence(u32),
    #[error("an acknowledgement up to message {0}, which was not sent")]
    Acknowledgement(u32),
    #[error("a frame that needs write {0}, which is beyond the window")]
    Needs(u32),
    #[error("a notice of write {0}, which is beyond the window")]
    Notice(u16),
    #[error("write {0} is said to have arrived, but was not sent")]
    Arrival(u32),
    #[error("rail {0} is said to be {1}, which it can't be now")]
    Rail(usize, &'static str),
    #[error("memory {0} is {1}")]
    Memory(u32, &'static str),
    #[error("the other node has not said who it is, or says it again, or has no such number")]
    Hello,
}
