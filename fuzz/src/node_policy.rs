//! The policy file, and what the kernel says of a control group, whose name its owner chooses: nothing of it ends the service, and a policy has no direction.

use ringlet_node::policy::{Policy, pod};
use ringlet_node::who::{Who, group_in};

/// Of what a policy is made: scripts that are not text are numbers of these.
const PIECES: [&str; 39] = [
    "\n",
    "same_pod",
    "labels",
    "otherwise",
    "[[allow]]\n",
    "[limits]\n",
    "between",
    "users",
    "connections",
    "guests",
    "guests_of_a_user",
    "visits_of_a_user",
    "wait_seconds",
    " = ",
    "true",
    "false",
    "[",
    "]",
    ", ",
    "\"kernel\"",
    "\"isolated\"",
    "\"any\"",
    "\"same\"",
    "\"shop\"",
    "\"/a/*\"",
    "\"*/pod0123456789ab/*\"",
    "\"*\"",
    "\"..\"",
    "1",
    "0",
    "60",
    "99999999999999999999",
    "-1",
    "# ",
    "\"",
    "{",
    "}",
    ".",
    "between = [\"/a/*\", \"*\"]\n",
];

/// The same by lines.
const LINES: [&str; 12] = [
    "same_pod = false\n",
    "labels = ['shop', 'crm']\n",
    "labels = ['a/b']\n",
    "otherwise = 'kernel'\n",
    "[[allow]]\nbetween = ['/a/*', '*']\n",
    "[[allow]]\nbetween = ['*', '*']\nusers = 'any'\n",
    "[[allow]]\nbetween = ['*', '/b']\nusers = [1, 2]\n",
    "users = 'any'\n",
    "[limits]\n",
    "guests = 3\n",
    "wait_seconds = 3601\n",
    "\n",
];

/// Was it a policy?
pub fn run(script: &[u8]) -> usize {
    let (kind, rest) = script.split_first().unwrap_or((&0, &[]));
    let (text, groups) = rest.split_at(rest.len() - rest.len() / 4);
    let text = match kind % 3 {
        0 => String::from_utf8_lossy(text).into_owned(),
        1 => text
            .iter()
            .take(text.len() % 4)
            .map(|byte| LINES[usize::from(*byte) % LINES.len()])
            .collect(),
        _ => text.iter().map(|byte| PIECES[usize::from(*byte) % PIECES.len()]).collect(),
    };
    let groups = String::from_utf8_lossy(groups);
    let mut ends = groups.splitn(2, '|').map(|group| {
        let group = group_in(group).unwrap_or_else(|| group.to_owned());
        assert!(group.starts_with(pod(&group)));
        let mut who = Who::default();
        (who.user, who.group) = (Some(group.len() as u32 % 3), Some(group));
        let shown = who.text();
        assert!(shown.len() < 2000 && !shown.contains(|each: char| each.is_control()), "{shown}");
        who
    });
    let (one, other) = (ends.next().unwrap_or_default(), ends.next().unwrap_or_default());
    let Ok(policy) = Policy::parse(&text) else { return 0 };
    let allowed = policy.allows(&one, &other);
    assert_eq!(allowed, policy.allows(&other, &one));
    assert!(allowed.is_none() || one.user.is_some() && other.user.is_some(), "of nobody");
    1
}
