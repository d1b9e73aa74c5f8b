# `make check` is what CI runs.
.PHONY: check fmt clippy test doc callgrind
check: fmt clippy test doc
fmt:
	cargo fmt --all --check
clippy:
	cargo clippy --workspace --all-targets --release -- -D warnings
test:
	cargo test --workspace --release
doc:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --release
# Instructions of a step of decoding, to compare with crates/entrokv/benches/decode_step.txt.
callgrind:
	crates/entrokv/benches/decode_step.sh
