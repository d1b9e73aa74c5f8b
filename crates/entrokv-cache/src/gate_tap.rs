//! Gates: what says of a token, as it is read, whether it will be needed.

/// The gate whose scores a policy reads.
///
/// A gate looks at what the model feeds a layer (or makes of it) and gives every token of every KV head one number, once, when
/// the token is read; some give one to the whole head. Whoever runs the model computes it, for its sizes are the model's; what is
/// kept is the number alone, and a policy finds it in [`ResidentTokens::gates`](crate::ResidentTokens::gates).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GateTap {
    /// None.
    #[default]
    None,
    /// FastKVzip's: the layer's input, after its norm, against learned sinks.
    FastKvzip,
    /// KVzap's: a linear map of the layer's input after its norm, or a small network.
    Kvzap,
    /// A linear map of the layer's input before its norm.
    Projection,
    /// The last channel of the first query head of the group, after the norm of queries and before RoPE. It is the gate's alone:
    /// attention sees 0 there, before RoPE and after it.
    QueryChannel,
    /// A number a KV head, the same for all its tokens: how much it looks far back, from a table.
    HeadTable,
    /// The same, estimated from the prompt's queries and keys before RoPE.
    HeadEstimate,
}

impl GateTap {
    /// Whether it has a number for each token, which it must see to have.
    #[must_use]
    pub fn sees_tokens(self) -> bool {
        !matches!(self, Self::None | Self::HeadTable | Self::HeadEstimate)
    }
}
