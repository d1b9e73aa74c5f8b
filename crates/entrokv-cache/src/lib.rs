//! The idea of EntroKV without tensors: pages, pool, block tables, budgets, the byte ledger and eviction policies.
