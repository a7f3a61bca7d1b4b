//! What each run of each node has seen of the order, and whether all of that is one order.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use ringlet_order::{Life, View};

/// Something that one run's owner was told, or did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// Its next submission: what it is.
    Submits(u64),
    Delivered {
        sequence: u64,
        origin: Life,
        number: u64,
        what: u64,
    },
    View {
        sequence: u64,
        view: View,
        joined: Vec<Life>,
    },
    Stable(u64),
}

/// Everything, as it happened one by one.
#[derive(Default)]
pub struct History {
    pub seen: Vec<(Life, Seen)>,
    /// Of these nodes an operator has said that nothing they did alone is ever seen again.
    pub buried: BTreeSet<String>,
}

/// What a payload asks of the lock: its lowest bits.
const ACQUIRE: u64 = 1;
const RELEASE: u64 = 2;

/// A lock that is kept by all, by what they deliver.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
struct Lock {
    holder: Option<Life>,
    waiting: VecDeque<Life>,
}

impl Lock {
    fn delivered(&mut self, origin: &Life, what: u64) {
        let has_part = self.holder.as_ref() == Some(origin) || self.waiting.contains(origin);
        match what % 4 {
            ACQUIRE if !has_part => self.waiting.push_back(origin.clone()),
            RELEASE if self.holder.as_ref() == Some(origin) => self.holder = None,
            _ => {}
        }
        self.pass_on();
    }

    fn view(&mut self, members: &[Life]) {
        self.waiting.retain(|life| members.contains(life));
        self.holder = self.holder.take().filter(|life| members.contains(life));
        self.pass_on();
    }

    fn pass_on(&mut self) {
        if self.holder.is_none() {
            self.holder = self.waiting.pop_front();
        }
    }
}

/// One run, as far as its history goes.
#[derive(Default)]
struct Run {
    submitted: Vec<u64>,
    view: Option<View>,
    delivered: u64,
    stable: u64,
}

/// As all who were in it say.
struct Known {
    sequence: u64,
    members: Vec<Life>,
    joined: Vec<Life>,
}

impl Known {
    /// Nobody in it knows anything of what was before.
    fn is_empty(&self) -> bool {
        self.members.iter().all(|life| self.joined.contains(life))
    }
}

#[derive(Default)]
struct Checked {
    runs: BTreeMap<Life, Run>,
    views: BTreeMap<u64, Known>,
    /// What was delivered, by view and place: whose, its number, and what it is.
    places: BTreeMap<(u64, u64), (Life, u64, u64)>,
    buried: BTreeSet<String>,
    /// What each run has delivered last in each view.
    last: BTreeMap<u64, BTreeMap<Life, u64>>,
}

impl History {
    /// What is wrong with it, if anything. That is:
    ///
    /// - a run delivers a contiguous piece of the order, from its first view on, and its views have numbers one after the other;
    /// - nobody else's view of that number is another one;
    /// - in a view all deliver the same at the same place, and find the same holder of a lock;
    /// - who delivers behind a view's end belongs to no later one: nobody else has seen that;
    /// - in the order, a run's submissions are what it has submitted, from the first on, each once: of a dead one's a prefix;
    /// - what is told to be with all is with all.
    pub fn wrong(&self) -> Option<String> {
        let mut checked = Checked { buried: self.buried.clone(), ..Checked::default() };
        let one = self.seen.iter().try_for_each(|(life, seen)| {
            if self.buried.contains(&life.node) {
                checked.passed(life, seen);
                return Ok(());
            }
            let one = checked.one(life, seen);
            one.map_err(|wrong| format!("{}/{} {wrong}", life.node, life.incarnation))
        });
        one.and_then(|()| checked.end()).and_then(|()| self.locks(&checked)).err()
    }

    /// What each run takes for the holder of the lock, at each place: nobody else may take another one for it there.
    fn locks(&self, checked: &Checked) -> Result<(), String> {
        let (mut lock, mut begun, mut at) = (Lock::default(), BTreeMap::new(), BTreeMap::new());
        for (number, known) in &checked.views {
            if known.is_empty() {
                lock = Lock::default();
            }
            lock.view(&known.members);
            begun.insert(*number, lock.clone());
            for (place, (origin, _, what)) in
                checked.places.range((*number, 0)..=(*number, checked.ends_with(*number)))
            {
                lock.delivered(origin, *what);
                at.insert(*place, lock.holder.clone());
            }
        }
        let mut runs = BTreeMap::<&Life, (u64, Lock)>::new();
        for (life, seen) in self.seen.iter().filter(|(life, _)| !self.buried.contains(&life.node)) {
            match seen {
                Seen::View { view, .. } => match runs.get_mut(life) {
                    Some((number, lock)) => {
                        *number = view.number;
                        lock.view(&view.members);
                    }
                    // (It has it from those who were there before.)
                    None => drop(runs.insert(life, (view.number, begun[&view.number].clone()))),
                },
                Seen::Delivered { sequence, origin, what, .. } => {
                    let Some((number, lock)) = runs.get_mut(life) else { continue };
                    lock.delivered(origin, *what);
                    if let Some(holder) =
                        at.get(&(*number, *sequence)).filter(|holder| **holder != lock.holder)
                    {
                        return Err(format!(
                            "{holder:?} and {:?} hold the lock at {sequence}",
                            lock.holder
                        ));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// How much was delivered behind the ends of views: by those only who belong to no later one.
    pub fn unseen(&self) -> u64 {
        let mut checked = Checked::default();
        self.seen.iter().for_each(|(life, seen)| drop(checked.one(life, seen)));
        let behind = |number: &u64| {
            let last = checked.last.get(number).into_iter().flat_map(|last| last.values());
            last.map(|last| {
                last.saturating_sub(
                    checked.ends_with(*number).max(checked.views[number].sequence - 1),
                )
            })
            .sum::<u64>()
        };
        checked.views.keys().map(behind).sum()
    }

    /// Of each run: its last view, what it has delivered last, what it knows that all have, and how many of its own it has submitted and delivered.
    pub fn last(&self) -> BTreeMap<Life, Last> {
        let mut last = BTreeMap::<Life, Last>::new();
        for (life, seen) in &self.seen {
            let run = last.entry(life.clone()).or_default();
            match seen {
                Seen::Submits(_) => run.submitted += 1,
                Seen::Delivered { sequence, origin, .. } => {
                    run.delivered = *sequence;
                    run.own += u64::from(origin == life);
                }
                Seen::View { sequence, view, .. } => {
                    // (Of one that joins nobody asks for what was before.)
                    if run.view.is_none() {
                        run.stable = sequence - 1;
                    }
                    run.view = Some(view.clone());
                    run.delivered = sequence - 1;
                }
                Seen::Stable(sequence) => run.stable = *sequence,
            }
        }
        last
    }
}

#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Last {
    pub view: Option<View>,
    pub delivered: u64,
    pub stable: u64,
    pub submitted: u64,
    pub own: u64,
}

impl Checked {
    fn one(&mut self, life: &Life, seen: &Seen) -> Result<(), String> {
        let run = self.runs.entry(life.clone()).or_default();
        match seen {
            Seen::Submits(_) => {}
            Seen::View { sequence, view, joined } => self.view(life, *sequence, view, joined)?,
            Seen::Delivered { sequence, origin, number, what } => {
                let Some(view) = &run.view else {
                    return Err("delivers outside of any view".into());
                };
                if *sequence != run.delivered + 1 {
                    return Err(format!("delivers {sequence} behind {}", run.delivered));
                }
                if !view.members.contains(origin) {
                    return Err(format!("delivers of {origin:?}, who is no member"));
                }
                self.last.entry(view.number).or_default().insert(life.clone(), *sequence);
                let delivery = (origin.clone(), *number, *what);
                let place =
                    self.places.entry((view.number, *sequence)).or_insert_with(|| delivery.clone());
                if *place != delivery {
                    return Err(format!(
                        "delivers {delivery:?} at {sequence}, and others {place:?}"
                    ));
                }
            }
            Seen::Stable(sequence) => self.stable(life, *sequence)?,
        }
        self.passed(life, seen);
        Ok(())
    }

    /// It is so, right or wrong.
    fn passed(&mut self, life: &Life, seen: &Seen) {
        let run = self.runs.entry(life.clone()).or_default();
        match seen {
            Seen::Submits(what) => run.submitted.push(*what),
            Seen::View { sequence, view, .. } => {
                (run.view, run.delivered) = (Some(view.clone()), sequence - 1)
            }
            Seen::Delivered { sequence, .. } => run.delivered = *sequence,
            Seen::Stable(sequence) => run.stable = *sequence,
        }
    }

    fn view(
        &mut self,
        life: &Life,
        sequence: u64,
        view: &View,
        joined: &[Life],
    ) -> Result<(), String> {
        let run = self.runs.entry(life.clone()).or_default();
        if !view.members.contains(life) {
            return Err(format!("is in view {} and no member of it", view.number));
        }
        match &run.view {
            None if !joined.contains(life) => {
                return Err(format!("is in view {} from nowhere", view.number));
            }
            None => {}
            Some(last) if last.number + 1 != view.number => {
                return Err(format!("comes from view {} to {}", last.number, view.number));
            }
            Some(_) if joined.contains(life) => return Err("joins, and was there".into()),
            Some(_) if run.delivered + 1 != sequence => {
                return Err(format!(
                    "has delivered up to {}, and view {} begins at {sequence}",
                    run.delivered, view.number
                ));
            }
            Some(_) => {}
        }
        let (members, joined) = (view.members.clone(), joined.to_vec());
        let known = self.views.entry(view.number).or_insert_with(|| Known {
            sequence,
            members: members.clone(),
            joined: joined.clone(),
        });
        match (known.sequence, &known.members, &known.joined) == (sequence, &members, &joined) {
            true => Ok(()),
            false => Err(format!(
                "is in another view {} than others: {members:?}, and {:?}",
                view.number, known.members
            )),
        }
    }

    fn stable(&self, life: &Life, sequence: u64) -> Result<(), String> {
        let run = &self.runs[life];
        let Some(view) = &run.view else {
            return Err("knows what all have outside of any view".into());
        };
        if sequence < run.stable {
            return Err(format!("says that all have {sequence}, behind {}", run.stable));
        }
        let known = &self.views[&view.number];
        for member in &view.members {
            let delivered = self.runs.get(member).map_or(0, |run| run.delivered);
            if delivered < sequence && !(known.joined.contains(member) && sequence < known.sequence)
            {
                return Err(format!(
                    "says that all have {sequence}, and {member:?} has {delivered}"
                ));
            }
        }
        Ok(())
    }

    fn ends_with(&self, number: u64) -> u64 {
        self.views.get(&(number + 1)).map_or(u64::MAX, |next| next.sequence - 1)
    }

    /// Where it is over: what is behind the ends of views, and whether everybody's own is in order.
    fn end(&self) -> Result<(), String> {
        let mut next = BTreeMap::new();
        for (number, known) in &self.views {
            let end = self.ends_with(*number);
            for (life, last) in self.last.get(number).into_iter().flatten() {
                let goes_on =
                    self.views.get(&(number + 1)).is_some_and(|next| next.members.contains(life));
                if *last > end && goes_on {
                    return Err(format!(
                        "{life:?} delivers {last} in view {number}, which ended with {end}"
                    ));
                }
            }
            for ((_, sequence), (origin, counted, what)) in
                self.places.range((*number, 0)..=(*number, end))
            {
                if *sequence < known.sequence {
                    return Err(format!(
                        "{sequence} is delivered in view {number}, which begins at {}",
                        known.sequence
                    ));
                }
                let due = next.entry(origin).or_insert(1);
                if self.buried.contains(&origin.node) {
                    // (Some of it may be known to the buried only.)
                    *due = *counted.max(due);
                }
                if counted != due {
                    return Err(format!(
                        "of {origin:?} number {counted} is delivered at {sequence}, and {due} was due"
                    ));
                }
                let submitted =
                    self.runs.get(origin).and_then(|run| run.submitted.get(*counted as usize - 1));
                if submitted != Some(what) {
                    return Err(format!(
                        "of {origin:?} number {counted} is delivered as {what}, and was {submitted:?}"
                    ));
                }
                *due += 1;
            }
        }
        Ok(())
    }
}
