//! To come: page.
