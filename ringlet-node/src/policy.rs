//! Who may be introduced to whom: one file, `node.toml`. Whatever it does not allow stays on the kernel.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, ensure};
use serde::Deserialize;
use wildmatch::WildMatch;

use crate::cluster::members::Settings;
use crate::who::Who;

/// Where it lies, unless told otherwise; if there is none, what is said here holds.
pub const FILE: &str = "/etc/ringlet/node.toml";
/// The same with a word on each key.
pub const EXAMPLE: &str = include_str!("../node.toml");

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    pub same_pod: bool,
    pub labels: BTreeSet<String>,
    pub allow: Vec<Rule>,
    pub otherwise: Otherwise,
    pub limits: Limits,
    /// The node services of other hosts; none, if it is not said.
    pub cluster: Option<Settings>,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            same_pod: true,
            labels: BTreeSet::new(),
            allow: Vec::new(),
            otherwise: Otherwise::Kernel,
            limits: Limits::default(),
            cluster: None,
        }
    }
}

/// What becomes of two that may not share memory.
#[derive(Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "kebab-case")]
pub enum Otherwise {
    Kernel,
    /// A process of the service's carries between a segment of each (`carrier`).
    Isolated,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Patterns of control groups: of one end, and of the other.
    pub between: [String; 2],
    #[serde(default)]
    pub users: Users,
}

#[derive(Deserialize, Debug, Default)]
#[serde(rename_all = "kebab-case", untagged)]
pub enum Users {
    #[default]
    #[serde(skip)]
    Same,
    Word(Word),
    These(Vec<u32>),
}

#[derive(Deserialize, Clone, Copy, Debug)]
#[serde(rename_all = "kebab-case")]
pub enum Word {
    Same,
    Any,
}

#[derive(Deserialize, Clone, Copy, Debug)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Ends of connections whose beginning is remembered, for as long as they last.
    pub connections: u32,
    /// Ends that are with the service at a time, in all and of one user.
    pub guests: usize,
    pub guests_of_a_user: usize,
    /// Ends of one user that may come in a second.
    pub visits_of_a_user: u32,
    /// How long one end waits for the other.
    pub wait_seconds: u64,
    /// Connections that are carried at a time: in all, of one user, and of one user's pod.
    pub carried: usize,
    pub carried_of_a_user: usize,
    pub carried_of_a_pod: usize,
    /// The largest ring of one that is.
    pub carried_ring_bytes: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 262_144,
            guests: 8192,
            guests_of_a_user: 4096,
            visits_of_a_user: 5000,
            wait_seconds: 60,
            carried: 4096,
            carried_of_a_user: 1024,
            carried_of_a_pod: 512,
            carried_ring_bytes: 256 << 10,
        }
    }
}

/// Why two may share memory, as it is logged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allowed {
    pub by: &'static str,
    pub same_user: bool,
}

impl Policy {
    pub fn load(path: Option<&Path>) -> anyhow::Result<Policy> {
        let file = path.unwrap_or(Path::new(FILE));
        let text = match std::fs::read_to_string(file) {
            Err(error) if path.is_none() && error.kind() == std::io::ErrorKind::NotFound => {
                String::new()
            }
            read => read.with_context(|| file.display().to_string())?,
        };
        Policy::parse(&text).with_context(|| file.display().to_string())
    }

    /// The same while one holds already, which is kept if there is no file or nothing in it: one that an editor is about to write says nothing, and what
    /// holds without a file may allow more.
    pub fn load_again(path: &Path) -> anyhow::Result<Policy> {
        let shown = || path.display().to_string();
        let text = std::fs::read_to_string(path).with_context(shown)?;
        ensure!(!text.trim().is_empty(), "{}: nothing is in it", shown());
        Policy::parse(&text).with_context(shown)
    }

    /// What of it is another than of that one.
    pub fn differences(&self, other: &Policy) -> Vec<&'static str> {
        let limits = |policy: &Policy| format!("{:?}", policy.limits);
        let allow = |policy: &Policy| format!("{:?}", policy.allow);
        let all = [
            ("same_pod", self.same_pod != other.same_pod),
            ("labels", self.labels != other.labels),
            ("allow", allow(self) != allow(other)),
            ("otherwise", self.otherwise != other.otherwise),
            ("limits", limits(self) != limits(other)),
        ];
        all.into_iter().filter(|(_, is)| *is).map(|(what, _)| what).collect()
    }

    pub fn parse(text: &str) -> anyhow::Result<Policy> {
        let mut policy: Policy = toml::from_str(text)?;
        if let Some(cluster) = &mut policy.cluster {
            cluster.check().context("[cluster]")?;
        }
        for label in &policy.labels {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            ensure!(
                !label.is_empty()
                    && label.len() <= 40
                    && label.bytes().all(plain)
                    && !label.starts_with('.'),
                "the label {label:?} is not of letters, digits, dashes, dots and underscores, 40 at most"
            );
        }
        let limits = &policy.limits;
        ensure!(
            (1..=1 << 24).contains(&limits.connections)
                && (1..=1 << 20).contains(&limits.guests)
                && limits.guests_of_a_user >= 1
                && limits.visits_of_a_user >= 1
                && (1..=3600).contains(&limits.wait_seconds)
                && (1..=1 << 16).contains(&limits.carried)
                && limits.carried_of_a_user >= 1
                && limits.carried_of_a_pod >= 1
                && (64 << 10..=64 << 20).contains(&limits.carried_ring_bytes)
                && limits.carried_ring_bytes.is_power_of_two(),
            "a limit is out of range"
        );
        Ok(policy)
    }

    /// May these two share memory?
    pub fn allows(&self, one: &Who, other: &Who) -> Option<Allowed> {
        let same_user = one.user.is_some() && one.user == other.user;
        let by = |by| Some(Allowed { by, same_user });
        if same_user && one.label.is_some() && one.label == other.label {
            return by("label");
        }
        // (Of nobody whose group can't be told.)
        let (one_group, other_group) = (one.group.as_deref()?, other.group.as_deref()?);
        if self.same_pod && same_user && pod(one_group) == pod(other_group) {
            return by("same pod");
        }
        let matches = |rule: &Rule| {
            let is = |pattern: &str, group: &str| WildMatch::new(pattern).matches(group);
            let [first, second] = &rule.between;
            let users = match &rule.users {
                Users::Same | Users::Word(Word::Same) => same_user,
                Users::Word(Word::Any) => one.user.is_some() && other.user.is_some(),
                Users::These(these) => [one.user, other.user]
                    .iter()
                    .all(|user| user.is_some_and(|user| these.contains(&user))),
            };
            users
                && (is(first, one_group) && is(second, other_group)
                    || is(first, other_group) && is(second, one_group))
        };
        self.allow.iter().any(matches).then_some(Allowed { by: "rule", same_user })
    }
}

impl Policy {
    /// May this guest meet that end on another host? By a rule only, with a pattern of the form NODE:GROUP for the far one.
    pub fn allows_far(
        &self,
        who: &Who,
        node: &str,
        far_user: Option<u32>,
        far_group: &str,
    ) -> bool {
        let Some(group) = who.group.as_deref() else { return false };
        let same_user = who.user.is_some() && who.user == far_user;
        let matches = |rule: &Rule| {
            let users = match &rule.users {
                Users::Same | Users::Word(Word::Same) => same_user,
                Users::Word(Word::Any) => who.user.is_some() && far_user.is_some(),
                Users::These(these) => [who.user, far_user]
                    .iter()
                    .all(|user| user.is_some_and(|user| these.contains(&user))),
            };
            let is = |pattern: &str, text: &str| WildMatch::new(pattern).matches(text);
            let is_far = |pattern: &str| match pattern.split_once(':') {
                Some((on, of)) if !on.contains('/') => is(on, node) && is(of, far_group),
                _ => false,
            };
            let is_near = |pattern: &str| pattern.starts_with('/') && is(pattern, group);
            let [first, second] = &rule.between;
            users && (is_near(first) && is_far(second) || is_near(second) && is_far(first))
        };
        self.allow.iter().any(matches)
    }
}

/// The part of a control group's path that the containers of a pod have in common: down to the first directory that is named after a pod, as
/// Kubernetes (`pod1234-..`, `kubepods-burstable-pod1234_...slice`) and Podman (`libpod_pod_1234`) do; of what is in no pod, all of it.
pub fn pod(group: &str) -> &str {
    let mut end = 0;
    for part in group.split_inclusive('/') {
        end += part.len();
        if is_pod(part.trim_end_matches('/')) {
            return group[..end].trim_end_matches('/');
        }
    }
    group
}

fn is_pod(name: &str) -> bool {
    let id = name
        .trim_end_matches(".slice")
        .rsplit_once("pod_")
        .or_else(|| name.trim_end_matches(".slice").rsplit_once("pod"));
    id.is_some_and(|(_, id)| {
        let hex = |byte: u8| byte.is_ascii_hexdigit() || b"-_".contains(&byte);
        id.len() >= 8 && id.bytes().all(hex)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(user: u32, group: &str, label: Option<&str>) -> Who {
        Who {
            user: Some(user),
            group: Some(group.to_owned()),
            label: label.map(str::to_owned),
            ..Who::default()
        }
    }

    fn by(policy: &str, one: &Who, other: &Who) -> Option<&'static str> {
        let policy = Policy::parse(policy).unwrap();
        let found = policy.allows(one, other);
        assert_eq!(found, policy.allows(other, one), "it has no direction");
        found.map(|allowed| allowed.by)
    }

    const POD: &str =
        "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0f1c2d3e_4a5b.slice";

    #[test]
    fn pods_are_told_from_their_containers() {
        assert_eq!(pod(&format!("{POD}/cri-containerd-12.scope")), POD);
        assert_eq!(
            pod("/kubepods/besteffort/pod01234567-89ab/0123"),
            "/kubepods/besteffort/pod01234567-89ab"
        );
        let libpod = "/machine.slice/machine-libpod_pod_0123456789ab.slice";
        assert_eq!(pod(&format!("{libpod}/libpod-12.scope")), libpod);
        for alone in [
            "/",
            "/system.slice/docker-0123456789ab.scope",
            "/user.slice/podman.scope",
            "/x/libpod-0123456789",
        ] {
            assert_eq!(pod(alone), alone);
        }
    }

    #[test]
    fn by_default_the_same_user_in_the_same_pod() {
        let (one, other) = (format!("{POD}/one"), format!("{POD}/other"));
        assert_eq!(by("", &who(7, &one, None), &who(7, &other, None)), Some("same pod"));
        assert_eq!(by("", &who(7, &one, None), &who(8, &other, None)), None);
        assert_eq!(by("", &who(7, "/a", None), &who(7, "/b", None)), None);
        assert_eq!(by("same_pod = false", &who(7, "/a", None), &who(7, "/a", None)), None);
        let nobody = Who { user: None, ..who(7, "/a", None) };
        assert_eq!(by("", &nobody, &nobody), None, "who can't be told is nobody's like");
        let nowhere = Who { group: None, ..who(7, "/a", None) };
        assert_eq!(by("", &nowhere, &nowhere), None);
    }

    #[test]
    fn rules_and_labels_allow_more() {
        let rule = "[[allow]]\nbetween = ['/shop/web-*', '/shop/db']\n";
        assert_eq!(by(rule, &who(7, "/shop/web-1", None), &who(7, "/shop/db", None)), Some("rule"));
        assert_eq!(by(rule, &who(7, "/shop/web-1", None), &who(8, "/shop/db", None)), None);
        assert_eq!(by(rule, &who(7, "/shop/web-1", None), &who(7, "/shop/web-2", None)), None);
        for users in ["'any'", "[7, 8]"] {
            let rule = format!("{rule}users = {users}");
            assert_eq!(
                by(&rule, &who(7, "/shop/web-1", None), &who(8, "/shop/db", None)),
                Some("rule")
            );
        }
        let only = format!("{rule}users = [7]");
        assert_eq!(by(&only, &who(7, "/shop/web-1", None), &who(8, "/shop/db", None)), None);
        assert_eq!(by("", &who(7, "/a", Some("x")), &who(7, "/b", Some("x"))), Some("label"));
        assert_eq!(by("", &who(7, "/a", Some("x")), &who(7, "/b", Some("y"))), None);
        assert_eq!(by("", &who(7, "/a", Some("x")), &who(8, "/b", Some("x"))), None);
    }

    #[test]
    fn ends_of_other_hosts_are_allowed_by_rules_that_name_their_node() {
        let far = |user: u32, group: &'static str| (Some(user), group);
        let may = |rule: &str, node: &str, (user, group): &(Option<u32>, &str)| {
            let policy = Policy::parse(rule).unwrap();
            policy.allows_far(&who(7, "/shop/web", None), node, *user, group)
        };
        let rule = "[[allow]]\nbetween = ['/shop/web', 'db-*:/shop/db']\n";
        assert!(may(rule, "db-1", &far(7, "/shop/db")));
        assert!(may(&format!("{rule}users = 'any'"), "db-1", &far(8, "/shop/db")));
        for (node, end) in [
            ("db-1", far(8, "/shop/db")),
            ("db-1", far(7, "/shop/other")),
            ("web", far(7, "/shop/db")),
        ] {
            assert!(!may(rule, node, &end), "{node} {end:?}");
        }
        // By nothing that is said of this host.
        let near = "[[allow]]\nbetween = ['*', '*']\nusers = 'any'";
        assert!(!may(near, "db-1", &far(7, "/shop/web")) && !may("", "db-1", &far(7, "/shop/web")));
    }

    #[test]
    fn what_is_wrong_is_said() {
        for wrong in [
            "same_pot = true",
            "otherwise = 'separate'",
            "[limits]\ncarried_ring_bytes = 100000",
            "[limits]\ncarried_of_a_pod = 0",
            "labels = ['../x']",
            "[limits]\nguests = 0",
            "[[allow]]\nbetween = ['/a']",
        ] {
            assert!(Policy::parse(wrong).is_err(), "{wrong}");
        }
        Policy::parse(EXAMPLE).unwrap();
    }

    #[test]
    fn what_is_read_again_is_not_taken_from_no_file_or_an_empty_one() {
        let file = std::env::temp_dir().join(format!("ringlet-policy-{}", std::process::id()));
        for text in ["", "\n \n"] {
            std::fs::write(&file, text).unwrap();
            assert!(Policy::load_again(&file).is_err(), "{text:?}");
        }
        std::fs::write(&file, "same_pod = false").unwrap();
        let read = Policy::load_again(&file).unwrap();
        assert_eq!(read.differences(&Policy::default()), ["same_pod"]);
        std::fs::remove_file(&file).unwrap();
        assert!(Policy::load_again(&file).is_err(), "there is none");
    }

    #[test]
    fn who_may_not_share_memory_is_carried_only_where_that_is_said() {
        let otherwise = |text: &str| Policy::parse(text).unwrap().otherwise;
        assert_eq!(otherwise(""), Otherwise::Kernel);
        assert_eq!(otherwise("otherwise = 'kernel'"), Otherwise::Kernel);
        assert_eq!(otherwise("otherwise = 'isolated'"), Otherwise::Isolated);
        // It allows nobody more.
        let isolated = "otherwise = 'isolated'";
        assert_eq!(by(isolated, &who(7, "/a", None), &who(7, "/b", None)), None);
        assert_eq!(by(isolated, &who(7, "/a", None), &who(7, "/a", None)), Some("same pod"));
    }

    #[test]
    fn the_example_says_what_holds_without_a_file() {
        let (example, none) = (Policy::parse(EXAMPLE).unwrap(), Policy::parse("").unwrap());
        assert_eq!(format!("{example:?}"), format!("{none:?}"));
    }
}
