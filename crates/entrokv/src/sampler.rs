//! To come: sampler.
