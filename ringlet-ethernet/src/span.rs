//! A network that spans hosts: on each of them a process that makes the others ports of the network here ([`crate::far`]). It hears whom the node
//! service lets in, calls them, and answers who asks how they are reached, or says how they are to be.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use ringlet_linux::{apart, meet};
use ringlet_messages::guarded::Guarded;
use ringlet_messages::native::Error;
use rustix::event::{PollFd, PollFlags, poll};

use crate::carried;
use crate::device::End;
use crate::far::{Address, Far, Host, News, Post, Spans};
use crate::keeper::may_end;
use crate::port::Event;
use crate::room::{Room, SPAN, Seat};
use crate::wire::{Answer, Ask, Choice, Hello, Span, VERSION, hear, say};

pub const HOSTS_MOST: usize = 64;
/// How long the node service is waited for at a time; and before it is tried again.
const PATIENCE: Duration = Duration::from_secs(1);
/// Who has connected and not yet said what for; one more, and the oldest goes.
const COMERS_MOST: usize = 16;

#[derive(Clone, Debug)]
pub struct Settings {
    pub hosts: Vec<Host>,
    /// Where this host hears others by UDP.
    pub listen: Option<SocketAddr>,
    /// How long to watch, at most, before a sleep.
    pub watch_us: u64,
}

/// Spans the hosts until somebody says `End`. `tell` hears what an operator may want to know.
pub fn up(
    settings: &Settings,
    room: Room,
    ends: (Sender<End>, Receiver<End>),
    ready: impl FnOnce(),
    tell: impl Fn(String) + Clone + Send + 'static,
) -> Result<()> {
    check(&settings.hosts)?;
    ensure!(
        room.bury(SPAN),
        "network {:?} spans hosts already, by another process: end that first (`ringlet eth way {0}` shows it)",
        room.name
    );
    let seat = Seat::take(&room, SPAN)?;
    let (ending, end) = ends;
    let (mut posts, mut threads) = (Vec::new(), Vec::new());
    let spans = Arc::new(Spans::new(&settings.hosts)?);
    for (nth, host) in settings.hosts.iter().enumerate() {
        let (post, spans) = (Post::new(host)?, Arc::clone(&spans));
        let how = (settings.listen, settings.watch_us);
        let far = Far::new(room.clone(), (host, nth), spans, how, Arc::clone(&post))?;
        posts.push((host.clone(), post));
        threads.push(far);
    }
    let posts: Arc<[(Host, Arc<Post>)]> = posts.into();
    let run = |far: Far| {
        let (ending, asked, tell) = (ending.clone(), ending.clone(), tell.clone());
        thread::Builder::new().name("far".into()).spawn(move || {
            let heard = move |event| match event {
                Event::Apart(why) => tell(why),
                Event::End => _ = asked.send(End::Asked),
                Event::Ports(_) => {}
            };
            if let Err(error) = far.run(&heard) {
                let _ = ending.send(End::Failed(format!("{error:#}")));
            }
        })
    };
    let threads: Vec<_> = threads.into_iter().map(run).collect::<Result<_, _>>()?;
    if posts.iter().any(|(host, _)| host.nodes().next().is_some()) {
        let (theirs, network, tell) = (Arc::clone(&posts), room.name.clone(), tell.clone());
        let comers = move || let_in(&theirs, &network, &tell);
        thread::Builder::new().name("comers".into()).spawn(comers)?;
    }
    for (host, post) in posts.iter() {
        for node in host.nodes() {
            let (post, node, network) = (Arc::clone(post), node.clone(), room.name.clone());
            let name = "calls".into();
            thread::Builder::new().name(name).spawn(move || call(&post, &node, &network))?;
        }
    }
    let (theirs, asked) = (Arc::clone(&posts), ending.clone());
    let (bell, rings) = UnixStream::pair()?;
    let says = tell.clone();
    let answers = move || answer_all(&room, seat, &bell, (&theirs, &asked), &says);
    let answers = thread::Builder::new().name("answers".into()).spawn(answers)?;
    ready();
    let why = end.recv().unwrap_or(End::Asked);
    posts.iter().for_each(|(_, post)| post.end());
    drop(rings);
    // (With the last one its socket goes, and who waits for the end hears of it.)
    for thread in threads.into_iter().chain([answers]) {
        let _ = thread.join();
    }
    match why {
        End::Asked => Ok(()),
        End::Failed(why) => bail!("{why}"),
    }
}

fn check(hosts: &[Host]) -> Result<()> {
    ensure!(
        !hosts.is_empty(),
        "which hosts? `--peer NODE`, or `--peer ADDRESS`, for each other one"
    );
    ensure!(hosts.len() <= HOSTS_MOST, "a network spans {HOSTS_MOST} other hosts at most");
    let ways: Vec<&Address> = hosts.iter().flat_map(|host| &host.0).collect();
    for (at, way) in ways.iter().enumerate() {
        ensure!(!ways[..at].contains(way), "{way} is named twice");
    }
    Ok(())
}

/// Those who call us by the node service: each goes to the host whose node has called.
fn let_in(posts: &[(Host, Arc<Post>)], network: &str, tell: &impl Fn(String)) {
    let is_over = || posts.iter().all(|(_, post)| post.is_over());
    let mut told = None;
    while !is_over() {
        let listener = match carried::listen(network) {
            Ok(listener) => listener,
            Err(error) => {
                if told.replace(error) != Some(error) {
                    tell(format!(
                        "the node service does not let others call :ethernet.{network}: {error}"
                    ));
                }
                thread::sleep(PATIENCE);
                continue;
            }
        };
        told = None;
        while !is_over() {
            let (connection, node) = match listener.accept_from(Some(PATIENCE)) {
                Ok((connection, Some(node))) => (connection, node),
                Ok(_) | Err(Error::TimedOut | Error::Interrupted) => continue,
                // (Descriptors may be free again.)
                Err(Error::System(_)) => {
                    thread::sleep(PATIENCE);
                    continue;
                }
                Err(_) => break,
            };
            // (Nobody else is heard: the channel ends with this.)
            let of = posts.iter().find(|(host, _)| host.nodes().any(|known| *known == node));
            if let (Some((_, post)), Ok(channel)) = (of, connection.channel()) {
                post.put(News::Came(node, channel));
            }
        }
    }
}

/// Calls a node whenever that has to be.
fn call(post: &Post, node: &str, network: &str) {
    let mut told = None;
    while !post.is_over() {
        if post.is_apart(node) {
            let channel = carried::call(node, network, Some(PATIENCE));
            let failed = channel.as_ref().err().copied();
            if failed.is_none() || failed != told {
                told = failed;
                post.put(News::Called(node.to_owned(), channel));
            }
        }
        thread::sleep(PATIENCE);
    }
}

/// Answers who asks, one message each.
fn answer_all(
    room: &Room,
    mut seat: Seat,
    bell: &UnixStream,
    (posts, asked): (&[(Host, Arc<Post>)], &Sender<End>),
    tell: &impl Fn(String),
) {
    let mut lost = None;
    let choice = AtomicU8::new(Choice::Auto as u8);
    let mut comers: VecDeque<Guarded> = VecDeque::new();
    // (Connections of those who asked us to end last until we have.)
    let mut ending = Vec::new();
    while posts.iter().any(|(_, post)| !post.is_over()) {
        // (As each port does for itself.)
        if !seat.is_here() {
            let why = seat.take_again(room, SPAN).err().map(|error| format!("{error:#}"));
            if let Some(why) = why.as_ref().filter(|_| why != lost) {
                tell(format!("network {:?} was removed under what spans it: {why}", room.name));
            }
            lost = why;
        }
        let mut fds =
            vec![PollFd::new(&*seat.socket, PollFlags::IN), PollFd::new(bell, PollFlags::IN)];
        fds.extend(comers.iter().map(|comer| PollFd::new(&**comer, PollFlags::IN)));
        let _ = poll(&mut fds, PATIENCE.try_into().ok().as_ref());
        let has_come = !fds[0].revents().is_empty();
        match seat.accept() {
            Some(comer) => {
                comers.truncate(COMERS_MOST);
                comers.push_front(comer);
            }
            // (No number is free, it may be: who waits there goes on waiting.)
            None if has_come => thread::sleep(PATIENCE),
            None => {}
        }
        for _ in 0..comers.len() {
            let Some(comer) = comers.pop_back() else { break };
            match hear::<Hello>(&comer) {
                Ok(None) => comers.push_front(comer),
                Err(_) => {}
                Ok(Some((hello, _))) => {
                    let user =
                        meet::credentials(comer.as_raw_fd()).map_or(apart::SOMEBODY, |who| who.uid);
                    let answer = answer(&hello, user, posts, &choice);
                    let _ = say(&comer, &answer, &[]);
                    if answer == Answer::Ending {
                        ending.push(comer);
                        let _ = asked.send(End::Asked);
                    }
                }
            }
        }
    }
}

fn answer(hello: &Hello, user: u32, posts: &[(Host, Arc<Post>)], choice: &AtomicU8) -> Answer {
    if hello.version != VERSION {
        let says = format!("it speaks version {VERSION:#x}, and not {:#x}", hello.version);
        return Answer::Refused(says);
    }
    let choices = [Choice::Auto, Choice::Node, Choice::Udp];
    match hello.ask {
        Ask::State => {
            let chosen = choice.load(Ordering::Relaxed);
            Answer::Span(Span {
                pid: std::process::id(),
                choice: choices.into_iter().find(|of| *of as u8 == chosen).unwrap_or(Choice::Auto),
                hosts: posts.iter().map(|(_, post)| post.reach()).collect(),
            })
        }
        Ask::Way(_) | Ask::End if !may_end(user) => {
            Answer::Refused("only its user, or root, changes it".into())
        }
        Ask::Way(of) => {
            choice.store(of as u8, Ordering::Relaxed);
            posts.iter().for_each(|(_, post)| post.choose(of));
            Answer::Done
        }
        Ask::End => Answer::Ending,
        _ => Answer::Refused("it spans hosts, and is nothing else".into()),
    }
}
