.PHONY: demo test soak setup

# The main job, shown: the same unmodified programs over kernel TCP and over ringlet.
demo:
	demo/run

# Everything that proves it. One stage: tests/run NAME.
test:
	tests/run

# Thousands of kills, at random moments.
soak:
	cargo build --release --workspace
	python3 tests/kill --kills 5000

# The programs that the tests and the demo run, where they may be installed.
setup:
	tests/setup
