.PHONY: build install man demo compare test suites gasnet gasnet-debug gasnet-tables torture faults containers lab attempts fuzz pvm disk ethernet memif ports papers mirror mirror-build mirror-cases mirror-unforgiving mirror-programs mirror-torture hosts between reflect-hosts soak sim-soak soak-order setup

PREFIX = /usr/local
TARGET = $(or $(CARGO_TARGET_DIR),target)
SHARE = $(DESTDIR)$(PREFIX)/share

VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)

# The command, which can be run in place as target/release/ringlet, the library beside it, and the native library.
build:
	cargo build --release -p ringlet-cli -p ringlet-preload -p ringlet-native -p ringlet-imc -p ringlet-shmem

# A program or a library, first under another name: whoever runs the old one keeps it, and nobody finds a part of the new one. (What is written over a file that
# is mapped ends those who have it.)
put = install -D -m 755 $(TARGET)/release/$(1) $(DESTDIR)$(PREFIX)/$(2).new && mv -f $(DESTDIR)$(PREFIX)/$(2).new $(DESTDIR)$(PREFIX)/$(2)

# Builds only if nothing has been built, so that root needs no toolchain.
install:
	test -x $(TARGET)/release/ringlet -a -f $(TARGET)/release/libringlet_native.so -a -f $(TARGET)/release/libimc.so \
		-a -f $(TARGET)/release/libringlet_shmem.so || $(MAKE) build
	$(call put,ringlet,bin/ringlet)
	$(call put,libringlet_preload.so,lib/ringlet/libringlet_preload.so)
	$(TARGET)/release/ringlet man $(SHARE)/man/man1
	install -d $(SHARE)/ringlet
	for file in deploy/*; do \
		sed -e "s|/usr/local|$(PREFIX)|g" $$file > $(SHARE)/ringlet/$${file#deploy/}; \
	done
	install -d $(SHARE)/bash-completion/completions $(SHARE)/zsh/site-functions \
		$(SHARE)/fish/vendor_completions.d
	$(TARGET)/release/ringlet completion bash > $(SHARE)/bash-completion/completions/ringlet
	$(TARGET)/release/ringlet completion zsh > $(SHARE)/zsh/site-functions/_ringlet
	$(TARGET)/release/ringlet completion fish > $(SHARE)/fish/vendor_completions.d/ringlet.fish
	$(call put,libringlet_native.so,lib/libringlet.so.0)
	ln -sf libringlet.so.0 $(DESTDIR)$(PREFIX)/lib/libringlet.so
	install -m 644 $(TARGET)/release/libringlet_native.a $(DESTDIR)$(PREFIX)/lib/libringlet.a
	install -m 755 ringlet-native/bin/* $(DESTDIR)$(PREFIX)/bin
	install -d $(DESTDIR)$(PREFIX)/include/sys
	install -m 644 ringlet-native/include/*.h $(DESTDIR)$(PREFIX)/include
	$(call put,libimc.so,lib/libimc.so)
	install -m 644 ringlet-imc/include/sys/imc.h $(DESTDIR)$(PREFIX)/include/sys
	install -m 755 ringlet-imc/bin/* $(DESTDIR)$(PREFIX)/bin
	$(call put,libringlet_shmem.so,lib/libringlet_shmem.so.0)
	ln -sf libringlet_shmem.so.0 $(DESTDIR)$(PREFIX)/lib/libringlet_shmem.so
	install -m 644 ringlet-shmem/include/shmem.h $(DESTDIR)$(PREFIX)/include
	install -D -m 644 ringlet-shmem/include/mpp/shmem.h $(DESTDIR)$(PREFIX)/include/mpp/shmem.h
	install -m 755 ringlet-shmem/bin/* $(DESTDIR)$(PREFIX)/bin
	install -d $(DESTDIR)$(PREFIX)/lib/pkgconfig $(SHARE)/man/man3
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@VERSION@|$(VERSION)|' ringlet-native/ringlet.pc.in \
		> $(DESTDIR)$(PREFIX)/lib/pkgconfig/ringlet.pc
	install -m 644 ringlet-native/man/*.3 $(SHARE)/man/man3
	for page in connect send mailbox region reflect port; do \
		for name in $$(sed -n '/^.SH NAME/{n;s/ \\-.*//;s/,//g;p;}' ringlet-native/man/ringlet_$$page.3); do \
			test $$name = ringlet_$$page || test $$name = ringlet_mailbox || \
				echo ".so man3/ringlet_$$page.3" > $(SHARE)/man/man3/$$name.3; \
		done; \
	done

# The manual pages, to be read without an installation.
man: build
	$(TARGET)/release/ringlet man $(TARGET)/man

# The main job, shown: the same unmodified programs over kernel TCP and over ringlet.
demo:
	demo/run

# Programs over the kernel's sockets and over ringlet, by turns: half an hour. `make compare ROUNDS=9 COMPARE='--only redis --plot ratios.svg'`
ROUNDS = 6
compare: build
	tests/setup redis memcached nginx postgresql python node java netpipe iperf3 sockperf compare || true
	PATH="$$PATH:/usr/sbin:/sbin" $(TARGET)/release/ringlet compare --rounds $(ROUNDS) $(COMPARE) tests/compare/*.toml

# Everything that proves it. One stage: tests/run NAME.
test:
	tests/run

# GASNet's own tests and measurements over ringlet; GASNET is an unpacked release of GASNet-EX: `make gasnet GASNET=DIR`. Some minutes.
# gasnet-tables measures it beside GASNet's own AMUDP and shared memory.
# With UPCXX, unpacked sources of UPC++, those are built on it, and their tests run.
gasnet: build
	python3 tests/gasnet $(if $(GASNET),--sources $(GASNET)) $(if $(UPCXX),--upcxx $(UPCXX)) $(TABLES) --ringlet $(TARGET)/release/ringlet
gasnet-debug: TABLES = --debug
gasnet-tables: TABLES = --tables
gasnet-debug gasnet-tables: gasnet

# CPython's own tests, on two versions of Python: an hour or two. Their quick part is in `make test`.
suites: build
	python3 tests/suites --ringlet $(TARGET)/release/ringlet
	python3 tests/suites/native.py --ringlet $(TARGET)/release/ringlet

# Connections used in every way at once, for as long as is asked for.
SECONDS = 14400
torture: build
	python3 tests/torture --seconds $(SECONDS) --ringlet $(TARGET)/release/ringlet

# Over two segments that an adapter keeps in step: all cases, also by sleeping; with changing paths; real programs; torture. A quarter of an hour;
# `make -k mirror SEED=11 SECONDS=3600`.
SEED = 7
OVER = --mirror
OVER_A_MIRROR = $(OVER) $(SEED) --ringlet $(TARGET)/release/ringlet
CASES_OVER_A_MIRROR = $(TARGET)/release/conformance run $(OVER) $(SEED) --library $(TARGET)/release/libringlet_preload.so
mirror: mirror-cases mirror-unforgiving mirror-programs mirror-torture
mirror-build:
	cargo build --release --workspace
mirror-cases: mirror-build
	$(CASES_OVER_A_MIRROR)
mirror-unforgiving: mirror-build
	$(CASES_OVER_A_MIRROR) --unforgiving $(SEED)
mirror-programs: mirror-build
	python3 tests/programs --seed $(SEED) $(OVER_A_MIRROR)
mirror-torture: SECONDS = 300
mirror-torture: mirror-build
	python3 tests/torture --seed $(SEED) --seconds $(SECONDS) $(OVER_A_MIRROR)

# The same over what carries between two hosts, both in the adapter's process, by rails that fail and come back; and that process killed.
hosts:
	$(MAKE) mirror OVER=--hosts
	python3 tests/kill/adapter.py --hosts --ringlet $(TARGET)/release/ringlet
	python3 tests/kill/adapter.py --hosts --family unix --ringlet $(TARGET)/release/ringlet

# Between two hosts, each a network namespace with a node service: torture, kills of ends and of what carries, real programs; over rails in memory, in disorder
# by the seed, and over libfabric's tcp. Half an hour (as root); `make -k between SEED=11 SECONDS=3600 KILLS=10`.
between: between-memory between-tcp
between-%: SECONDS = 180
between-%: KILLS = 2
between-%: build
	python3 tests/torture --between $* --seed $(SEED) --seconds $(SECONDS) --ringlet $(TARGET)/release/ringlet
	python3 tests/kill --between $* --seed $(SEED) --kills $$(($(KILLS) * 100)) --ringlet $(TARGET)/release/ringlet
	python3 tests/kill/adapter.py --between $* --seed $(SEED) --kills $$(($(KILLS) * 100)) --ringlet $(TARGET)/release/ringlet
	python3 tests/programs --between $* --seed $(SEED) --ringlet $(TARGET)/release/ringlet

# How fast reflective memory of two hosts is, beside a connection that is carried between them and a copy in memory, by turns: over rails in memory, and over
# libfabric's tcp; a minute or two (as root).
reflect-hosts: build
	cargo build --release -p ringlet-reflect --example reflect_speed
	python3 tests/node/reflect_speed.py --rounds $(ROUNDS) --ringlet $(TARGET)/release/ringlet

# Faults from outside: packets, addresses, firewall rules, limits, clocks, signals; `make faults SECONDS=3600`.
faults: build
	python3 tests/faults --seconds $(SECONDS) --ringlet $(TARGET)/release/ringlet

# What PVM's messages and an application of its cost over the kernel and over ringlet, by turns; on one host, and on two, each a network namespace
# with a node service (as root).
pvm: build
	tests/setup pvm fabric || true
	python3 tests/pvm --measure --rounds $(ROUNDS) --ringlet $(TARGET)/release/ringlet

# A disk by reflective memory beside nbdkit over TCP, by turns; on one host, and on two, each a network namespace with a node service (as root).
disk: build
	tests/setup disk fabric || true
	python3 tests/disk --measure --direct --rounds $(ROUNDS) --ringlet $(TARGET)/release/ringlet

# Devices of `ringlet eth` beside veth, vde2, slirp4netns and pasta, as far as those are installed (as root).
ethernet: build
	python3 tests/eth/compare.py --rounds $(ROUNDS) --ringlet $(TARGET)/release/ringlet

# Frames of 64 and 1500 bytes from port to port, beside memif by DPDK's testpmd, by turns.
memif: build
	tests/setup memif || true
	python3 tests/eth/memif.py --rounds $(ROUNDS) --ringlet $(TARGET)/release/ringlet

# As many ports as a network takes, which come, speak and die: 4 GB of memory for some minutes. And a port that is killed at each moment there is.
ports:
	RINGLET_PORTS=512 cargo test --release -p ringlet-ethernet --test crowd -- --nocapture
	RINGLET_MOMENTS=all cargo test --release -p ringlet-ethernet --test dying -- --nocapture

# The figures of Memory Channel's paper, and of ETHOM's, beside what this machine does now (ETHOM's as root).
papers: build
	tests/setup pvm || true
	$(TARGET)/release/ringlet bench papers --json $(TARGET)/papers.json --plot $(TARGET)/papers

# Real programs in containers that Podman makes: a minute or two (as root).
containers: build
	tests/setup containers redis nginx postgresql || true
	python3 tests/containers --ringlet $(TARGET)/release/ringlet

# Guests of QEMU, with soft-RoCE and Debian's kernel: ten minutes (as root); `make lab LAB=rails`.
lab: build
	tests/setup lab redis netpipe python || true
	python3 tests/lab --ringlet $(TARGET)/release/ringlet $(LAB)

# A million connections between namespaces, and who shows their ends to the node service: no wrong match (as root).
ATTEMPTS = 1000000
attempts: build
	python3 tests/node/attempts.py --attempts $(ATTEMPTS) --ringlet $(TARGET)/release/ringlet

# Our end of shared memory, the node service, ports, and disks by NBD, against whatever a peer may write, and a guest or a client may say; needs a nightly compiler and cargo-fuzz.
FUZZ = 600
fuzz:
	for target in ring_peer message_peer node_guests node_policy eth_frames vhost_guest nbd_client disk_stream; do \
		cargo +nightly fuzz run $$target -- -max_total_time=$(FUZZ) -max_len=4096 || exit 1; \
	done

# 20,000 kills, at random moments: about an hour. With KILLS=1 a hundredth of them.
KILLS = 100
KILL = python3 tests/kill --pairs 4 --ringlet $(TARGET)/release/ringlet
soak: build
	$(KILL) --family tcp --kills $$(($(KILLS) * 110))
	$(KILL) --family unix --kills $$(($(KILLS) * 60))
	$(KILL) --family udp --kills $$(($(KILLS) * 30))
	python3 tests/kill/adapter.py --kills $$(($(KILLS) * 10)) --ringlet $(TARGET)/release/ringlet
	python3 tests/kill/adapter.py --kills $$(($(KILLS) * 10)) --family unix --ringlet $(TARGET)/release/ringlet

# Thousands of simulated clusters, each with other traffic and other faults.
sim-soak:
	SEEDS=0..20000 cargo test --release -p ringlet-sim --test seeds --test carried -- --nocapture

# Thousands of clusters with one order, each with other deaths, partitions and lost frames: ten minutes.
ORDERS = 0..12000
soak-order:
	SEEDS=$(ORDERS) cargo test --release -p ringlet-sim --test ordered every_seed -- --nocapture

# The programs that the tests and the demo run, where they may be installed.
setup:
	tests/setup
