//! What AMUDP adds to Active Messages 2.0: statistics, hooks around handlers, and variables.
#![allow(non_snake_case, non_upper_case_globals)] // the names of the interface

use crate::am::{self, endpoint, put};
use core::ffi::{c_char, c_int, c_void};
use ringlet_core::active::Kind;
use ringlet_messages::active_message::{Endpoint, Error, Incoming, PerKind, Statistics};
use std::fmt::Write;
use std::ptr::{null, null_mut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};

/// Waits are polite whatever it says.
#[unsafe(no_mangle)]
pub static AMUDP_PoliteSync: AtomicI32 = AtomicI32::new(0);
/// There is nothing to be silent about: only errors are told.
#[unsafe(no_mangle)]
pub static AMX_SilentMode: AtomicI32 = AtomicI32::new(0);
#[unsafe(no_mangle)]
pub static AMX_ProcessLabel: AtomicPtr<c_char> = AtomicPtr::new(null_mut());

/// `amudp_category_t`
pub fn category(message: &Incoming) -> c_int {
    match message.kind() {
        Kind::Short | Kind::Get => 0,
        Kind::Medium => 1,
        Kind::Bulk | Kind::Stored => 2,
    }
}

/// No interface of the network is used.
#[unsafe(no_mangle)]
pub extern "C" fn AMUDP_SetUDPInterface(_address: u32) -> c_int {
    0
}

// ---- hooks ----

type Before = extern "C" fn(c_int, c_int, c_int, *mut c_void, *mut c_void, usize, c_int, *mut u32);
type After = extern "C" fn(c_int, c_int);

/// Of an endpoint, by its address.
#[derive(Clone, Copy)]
struct Hooks {
    endpoint: usize,
    before: Option<Before>,
    after: Option<After>,
}

pub static ARE_HOOKS: AtomicBool = AtomicBool::new(false);
static HOOKS: Mutex<Vec<Hooks>> = Mutex::new(Vec::new());

#[unsafe(no_mangle)]
pub extern "C" fn AMUDP_SetHandlerCallbacks(
    ea: *const Endpoint,
    before: Option<Before>,
    after: Option<After>,
) -> c_int {
    // SAFETY: the program's own handle.
    let found = unsafe { endpoint(ea) }.and_then(Endpoint::tag);
    if let Ok(_tag) = found {
        let mut all = am::lock(&HOOKS);
        all.retain(|hooks| hooks.endpoint != ea.addr());
        if before.is_some() || after.is_some() {
            all.push(Hooks { endpoint: ea.addr(), before, after });
        }
        ARE_HOOKS.store(!all.is_empty(), Ordering::Relaxed);
    }
    am::done("AMUDP_SetHandlerCallbacks", found)
}

#[cold]
pub fn between_hooks(message: &Incoming, run: impl FnOnce()) {
    let ours = std::sync::Arc::as_ptr(message.endpoint()).addr();
    let found = am::lock(&HOOKS).iter().find(|hooks| hooks.endpoint == ours).copied();
    let Some(Hooks { before, after, .. }) = found else { return run() };
    let (kind, is_request) = (category(message), !message.is_reply() as c_int);
    if let Some(before) = before {
        let token = std::ptr::from_ref(message).cast_mut().cast();
        let (place, len) = if message.is_short() { (null_mut(), 0) } else { message.place() };
        let words = message.arguments();
        let handler = message.handler().into();
        // A copy: it is the program's to change.
        let mut arguments = words.to_vec();
        before(
            kind,
            is_request,
            handler,
            token,
            place.cast(),
            len,
            words.len() as c_int,
            arguments.as_mut_ptr(),
        );
    }
    run();
    if let Some(after) = after {
        after(kind, is_request);
    }
}

// ---- statistics ----

/// `amudp_stats_t`. What concerns lost packets and time is never counted: nothing is sent twice.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Stats {
    requests_sent: PerKind,
    replies_sent: PerKind,
    requests_retransmitted: PerKind,
    replies_retransmitted: PerKind,
    replies_squashed: PerKind,
    requests_received: PerKind,
    replies_received: PerKind,
    returned: u64,
    requests_out_of_order: u64,
    replies_out_of_order: u64,
    min_latency: u64,
    max_latency: u64,
    sum_latency: u64,
    request_data_bytes: PerKind,
    reply_data_bytes: PerKind,
    request_bytes: PerKind,
    reply_bytes: PerKind,
    bytes: u64,
}

const NOTHING: Stats = Stats {
    requests_sent: [0; 3],
    replies_sent: [0; 3],
    requests_retransmitted: [0; 3],
    replies_retransmitted: [0; 3],
    replies_squashed: [0; 3],
    requests_received: [0; 3],
    replies_received: [0; 3],
    returned: 0,
    requests_out_of_order: 0,
    replies_out_of_order: 0,
    min_latency: u64::MAX,
    max_latency: 0,
    sum_latency: 0,
    request_data_bytes: [0; 3],
    reply_data_bytes: [0; 3],
    request_bytes: [0; 3],
    reply_bytes: [0; 3],
    bytes: 0,
};

#[unsafe(no_mangle)]
pub static AMUDP_initial_stats: Stats = NOTHING;

impl From<Statistics> for Stats {
    fn from(from: Statistics) -> Stats {
        let (requests, replies) = (from.requests.bytes_in_all(), from.replies.bytes_in_all());
        Stats {
            requests_sent: from.requests.messages,
            replies_sent: from.replies.messages,
            requests_received: from.requests_received,
            replies_received: from.replies_received,
            returned: from.returned,
            request_data_bytes: from.requests.bytes,
            reply_data_bytes: from.replies.bytes,
            request_bytes: requests,
            reply_bytes: replies,
            bytes: requests.iter().chain(&replies).sum(),
            ..NOTHING
        }
    }
}

impl Stats {
    fn add(&mut self, more: &Stats) {
        let lists = [
            (&mut self.requests_sent, more.requests_sent),
            (&mut self.replies_sent, more.replies_sent),
            (&mut self.requests_retransmitted, more.requests_retransmitted),
            (&mut self.replies_retransmitted, more.replies_retransmitted),
            (&mut self.replies_squashed, more.replies_squashed),
            (&mut self.requests_received, more.requests_received),
            (&mut self.replies_received, more.replies_received),
            (&mut self.request_data_bytes, more.request_data_bytes),
            (&mut self.reply_data_bytes, more.reply_data_bytes),
            (&mut self.request_bytes, more.request_bytes),
            (&mut self.reply_bytes, more.reply_bytes),
        ];
        for (sums, more) in lists {
            for (sum, more) in sums.iter_mut().zip(more) {
                *sum = sum.wrapping_add(more);
            }
        }
        let numbers = [
            (&mut self.returned, more.returned),
            (&mut self.requests_out_of_order, more.requests_out_of_order),
            (&mut self.replies_out_of_order, more.replies_out_of_order),
            (&mut self.sum_latency, more.sum_latency),
            (&mut self.bytes, more.bytes),
        ];
        for (sum, more) in numbers {
            *sum = sum.wrapping_add(more);
        }
        self.min_latency = self.min_latency.min(more.min_latency);
        self.max_latency = self.max_latency.max(more.max_latency);
    }

    fn text(&self, whole_job: bool) -> String {
        let mut text = String::new();
        let mut line = |what: &str, [short, medium, long]: PerKind| {
            // (To a string, so that it can't fail.)
            let _ = writeln!(
                text,
                "  {what:26} {:12}   ({short} short, {medium} medium, {long} long)",
                short.wrapping_add(medium).wrapping_add(long)
            );
        };
        line("requests sent", self.requests_sent);
        line("replies sent", self.replies_sent);
        line("requests received", self.requests_received);
        line("replies received", self.replies_received);
        line("bytes of requests", self.request_data_bytes);
        line("bytes of replies", self.reply_data_bytes);
        line("the same with their heads", self.request_bytes);
        line("", self.reply_bytes);
        let _ = writeln!(text, "  {:26} {:12}", "came back", self.returned);
        let _ = writeln!(text, "  {:26} {:12}", "bytes sent in all", self.bytes);
        if whole_job {
            let difference = |sent: PerKind, got: PerKind| {
                sent.iter().sum::<u64>().wrapping_sub(got.iter().sum::<u64>()) as i64
            };
            let requests = difference(self.requests_sent, self.requests_received);
            let replies = difference(self.replies_sent, self.replies_received);
            let _ =
                writeln!(text, "  {:26} {requests:12}   ({replies} replies)", "sent, not received");
        }
        text
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn AMUDP_GetEndpointStatistics(ea: *const Endpoint, stats: *mut Stats) -> c_int {
    // SAFETY: the program's own handle.
    let found = unsafe { endpoint(ea) }.and_then(Endpoint::statistics);
    // SAFETY: null or valid.
    am::done(
        "AMUDP_GetEndpointStatistics",
        found.and_then(|found| unsafe { put(stats, found.into()) }),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn AMUDP_ResetEndpointStatistics(ea: *const Endpoint) -> c_int {
    // SAFETY: the program's own handle.
    let found = unsafe { endpoint(ea) }.and_then(Endpoint::reset_statistics);
    am::done("AMUDP_ResetEndpointStatistics", found)
}

#[unsafe(no_mangle)]
pub extern "C" fn AMUDP_AggregateStatistics(sum: *mut Stats, more: *const Stats) -> c_int {
    // SAFETY: null or valid, and the program's own; they may be the same, so one is copied.
    let result = match unsafe { (sum.as_mut(), more.as_ref().copied()) } {
        (Some(sum), Some(more)) => {
            sum.add(&more);
            Ok(())
        }
        _ => Err(Error::BadArgument),
    };
    am::done("AMUDP_AggregateStatistics", result)
}

/// The text stays until the next call.
#[unsafe(no_mangle)]
pub extern "C" fn AMUDP_DumpStatistics(
    stream: *mut c_void,
    stats: *const Stats,
    whole_job: c_int,
) -> *const c_char {
    static TEXT: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    // SAFETY: null or valid.
    let Some(stats) = (unsafe { stats.as_ref() }) else { return null() };
    let mut text = am::lock(&TEXT);
    *text = stats.text(whole_job != 0).into_bytes();
    text.push(0);
    if !stream.is_null() {
        // SAFETY: the program's stream, and a C string.
        unsafe { libc::fputs(text.as_ptr().cast(), stream.cast()) };
    }
    text.as_ptr().cast()
}
