//! Programs on several hosts, each with its keeper: what one writes all receive, in one order; and who dies, whenever, harms what is his.

mod common;

use std::sync::atomic::Ordering;

#[allow(unused_imports)]
use common::{Cluster, PATIENCE, until};
use ringlet_reflect::{Permission, Status, Use, Wait};

#[test]
fn what_is_written_on_one_host_is_received_on_all() {
    let cluster = Cluster::new(2);
    let hosts = [cluster.host(0), cluster.host(1)];
    let how = Permission::default();
    let regions = [0, 1].map(|host: usize| hosts[host].allocate(7, 5000, &how).unwrap());
    assert_eq!(regions[0].id(), regions[1].id());
    let transmitter = regions[0].transmit(Use::default()).unwrap();
    let receivers = [0, 1].map(|host: usize| regions[host].receive(Use::default()).unwrap());
    for (at, length) in
        [(0, 1), (1, 7), (3, 4), (5, 8), (7, 100), (4090, 12), (8191, 1), (8192, 0), (0, 8192)]
    {
        let bytes: Vec<u8> = (0..length).map(|n| (n * 7 + at) as u8 | 1).collect();
        transmitter.put(at, &bytes).unwrap();
        for receiver in &receivers {
            let mut got = vec![0; length];
            until("what was written", || {
                receiver.get(at, &mut got).unwrap();
                got == bytes
            });
        }
    }
    assert_eq!(transmitter.put(8190, &[1, 2, 3]), Err(Status::BadParameter));
}
