//! A runner that keeps the bits of every logit it hands out.

use std::sync::{Arc, Mutex};

use entrokv::gguf::Gguf;
use entrokv::model::{AttentionSink, BatchSpan, Decoder, Logits, ModelRunner, RunError};
use entrokv::{Engine, ModelOptions};

use crate::support::watched::{Watch, watched};

/// Rows of logits, in the order in which they were computed.
pub(crate) type Rows = Arc<Mutex<Vec<Vec<u32>>>>;

/// Keeps them.
struct Recorder(Rows);

/// An engine without a tokenizer, and the logits it computes.
pub(crate) fn recorded(gguf: &Gguf, options: &ModelOptions) -> (Engine, Rows) {
    let rows = Rows::default();
    (watched(gguf, options, Recorder(Arc::clone(&rows))), rows)
}

impl Watch for Recorder {
    fn forward(
        &mut self,
        decoder: &mut Decoder,
        batch: &[BatchSpan<'_>],
        sink: &mut dyn AttentionSink,
    ) -> Result<Logits, RunError> {
        let mut logits = decoder.forward(batch, sink)?;
        for span in 0..batch.len() {
            let bits = logits.rows(span).map(|row| row.iter().map(|logit| logit.to_bits()).collect());
            self.0.lock().unwrap().extend(bits);
        }
        Ok(logits)
    }
}
