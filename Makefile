# `make check` is what CI runs.
.PHONY: check fmt clippy test doc callgrind asan
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
# The tests of the crate with the unsafe code under AddressSanitizer (nightly), on every instruction set of this CPU.
asan:
	RUSTFLAGS="-Zsanitizer=address" cargo +nightly test -p entrokv-kernels --lib --tests --release \
		--target $$(rustc -vV | sed -n 's/^host: //p') --target-dir target/asan
