//! To come: dequantize.
