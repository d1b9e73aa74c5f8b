# `make check` is what CI runs.
.PHONY: check fmt clippy test doc
check: fmt clippy test doc
fmt:
	cargo fmt --all --check
clippy:
	cargo clippy --workspace --all-targets --release -- -D warnings
test:
	cargo test --workspace --release
doc:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --release
