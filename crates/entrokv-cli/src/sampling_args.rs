//! Flags that choose tokens and end answers.

use std::num::NonZeroUsize;

use clap::Args;
use clap::builder::FalseyValueParser;
use entrokv::SamplingOptions;

/// How to choose tokens.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Choosing tokens")]
pub(crate) struct SamplingArgs {
    /// 0 always takes the likeliest token; higher is more varied
    #[arg(long, env = "ENTROKV_TEMPERATURE", value_name = "T", default_value_t = 0.0, visible_alias = "temp")]
    temperature: f32,
    /// Keep the K likeliest tokens; 0 keeps all
    #[arg(long, env = "ENTROKV_TOP_K", value_name = "K", default_value_t = 40)]
    top_k: usize,
    /// Keep the likeliest tokens that together have this probability; 1 keeps all
    #[arg(long, env = "ENTROKV_TOP_P", value_name = "P", default_value_t = 0.95)]
    top_p: f32,
    /// Keep tokens at least this likely relative to the likeliest; 0 keeps all
    #[arg(long, env = "ENTROKV_MIN_P", value_name = "P", default_value_t = 0.05)]
    min_p: f32,
    /// Divide the logits of recent tokens by this; 1 changes nothing
    #[arg(
        long,
        env = "ENTROKV_REPETITION_PENALTY",
        value_name = "X",
        default_value_t = 1.0,
        visible_alias = "repeat-penalty"
    )]
    repetition_penalty: f32,
    /// Lower the logits of tokens that have occurred
    #[arg(long, env = "ENTROKV_PRESENCE_PENALTY", value_name = "X", default_value_t = 0.0, allow_hyphen_values = true)]
    presence_penalty: f32,
    /// Lower the logits of tokens by how often they have occurred
    #[arg(
        long,
        env = "ENTROKV_FREQUENCY_PENALTY",
        value_name = "X",
        default_value_t = 0.0,
        allow_hyphen_values = true
    )]
    frequency_penalty: f32,
    /// Tokens the penalties look back on
    #[arg(
        long,
        env = "ENTROKV_PENALTY_WINDOW",
        value_name = "N",
        default_value_t = 64,
        visible_alias = "repeat-last-n"
    )]
    penalty_window: usize,
    /// Seed of the random choice [default: a random one]
    #[arg(short, long, env = "ENTROKV_SEED", value_name = "N")]
    seed: Option<u64>,
    /// Add to the logit of a token, such as 15043=+1 or 2=-inf; may be repeated
    #[arg(long, env = "ENTROKV_LOGIT_BIAS", value_name = "ID=BIAS", value_parser = parse_bias, value_delimiter = ',', allow_hyphen_values = true)]
    logit_bias: Vec<(u32, f32)>,
    /// End the answer before this text; may be repeated
    #[arg(long = "stop", env = "ENTROKV_STOP", value_name = "TEXT", visible_alias = "reverse-prompt")]
    pub(crate) stop: Vec<String>,
    /// Most tokens to generate [default: to the end of the context]
    #[arg(short = 'n', long, env = "ENTROKV_MAX_TOKENS", value_name = "N", visible_alias = "n-predict")]
    pub(crate) max_tokens: Option<NonZeroUsize>,
    /// Go on after the model's end tokens
    #[arg(long, env = "ENTROKV_IGNORE_EOS", value_parser = FalseyValueParser::new())]
    pub(crate) ignore_eos: bool,
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let (id, bias) = text.split_once('=').ok_or("expected ID=BIAS, such as 15043=+1")?;
    let id = id.trim().parse().map_err(|_| format!("'{id}' is not a token id"))?;
    let bias: f32 = bias.trim().parse().map_err(|_| format!("'{bias}' is not a number"))?;
    if bias.is_nan() { Err("the bias is not a number".to_string()) } else { Ok((id, bias)) }
}

impl SamplingArgs {
    /// The library's options.
    pub(crate) fn options(&self) -> SamplingOptions {
        SamplingOptions {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_window: self.penalty_window,
            seed: self.seed,
            logit_bias: self.logit_bias.clone(),
        }
    }
}
