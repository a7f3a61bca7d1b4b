.PHONY: build install man demo test soak sim-soak setup

PREFIX = /usr/local
TARGET = $(or $(CARGO_TARGET_DIR),target)
SHARE = $(DESTDIR)$(PREFIX)/share

# The command, which can be run in place as target/release/ringlet, and the library beside it.
build:
	cargo build --release -p ringlet-cli -p ringlet-preload

# Builds only if nothing has been built, so that root needs no toolchain.
install:
	test -x $(TARGET)/release/ringlet || $(MAKE) build
	install -D -m 755 $(TARGET)/release/ringlet $(DESTDIR)$(PREFIX)/bin/ringlet
	install -D -m 755 $(TARGET)/release/libringlet_preload.so \
		$(DESTDIR)$(PREFIX)/lib/ringlet/libringlet_preload.so
	$(TARGET)/release/ringlet man $(SHARE)/man/man1
	install -d $(SHARE)/bash-completion/completions $(SHARE)/zsh/site-functions \
		$(SHARE)/fish/vendor_completions.d
	$(TARGET)/release/ringlet completion bash > $(SHARE)/bash-completion/completions/ringlet
	$(TARGET)/release/ringlet completion zsh > $(SHARE)/zsh/site-functions/_ringlet
	$(TARGET)/release/ringlet completion fish > $(SHARE)/fish/vendor_completions.d/ringlet.fish

# The manual pages, to be read without an installation.
man: build
	$(TARGET)/release/ringlet man $(TARGET)/man

# The main job, shown: the same unmodified programs over kernel TCP and over ringlet.
demo:
	demo/run

# Everything that proves it. One stage: tests/run NAME.
test:
	tests/run

# Thousands of kills, at random moments.
soak: build
	python3 tests/kill --kills 5000 --ringlet $(TARGET)/release/ringlet

# Thousands of simulated clusters, each with other traffic and other faults.
sim-soak:
	SEEDS=0..20000 cargo test --release -p ringlet-sim --test seeds -- --nocapture

# The programs that the tests and the demo run, where they may be installed.
setup:
	tests/setup
