//! The recipe of small caches: what the policy `auto` stands for under a budget.

use crate::budget::{Budget, Ratio};
use crate::page_kind::PageKind;
use crate::policy::PolicyError;
use crate::shape::CacheShape;
use crate::tiers::Tiers;

/// Tiers by the part of the full cache that a budget is, in per cent: those of the first line it reaches.
///
/// Keys are what retrieval is lost by, so the best pages have theirs in 8 bits as long as there is room for enough pages beside.
const BY_SHARE: [(f64, &str); 4] = [
    (44.0, "q8_0/tq4"),
    (15.0, "q8_0/tq4:3nats+tq3v2"),
    (8.0, "q8_0/tq4:3nats+tq4/tq2"),
    (f64::NEG_INFINITY, "tq4:3nats+tq3v2"),
];

/// Whether the question that the cache must answer stands in the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// It does: the prompt's last queries say what is needed.
    Seen,
    /// It comes later, so that scores must not depend on it: a pass repeats the text.
    Later,
    /// It comes with a later turn of a conversation. Nobody waits for the pass, and what the last rows look at is this turn's
    /// question, not the next one.
    NextTurn,
    /// It comes later, and a few questions that any text may be asked stand for it: cheaper, and worse.
    Probed,
}

/// The name of the recipe on a command line.
pub const AUTO: &str = "auto";

/// The text of the policy that `auto`, or `auto:KEY=VALUE,...`, stands for under `budget`; options replace those of the recipe,
/// and `pass=none`, `pass=probe` or `pass=reconstruct` says what scores are made of.
///
/// Pages are of two tiers, which become smaller with the budget; where it has room for everything, one tier is enough. Where a pass
/// has scored all tokens they are packed by score. Rows of a question are no such score: they look at what a fact is about, and what
/// it says is looked at in the answer, so that pages stay together there. A budget that is no part of the prompt
/// ([`Budget::of_prompt`] makes it one) is treated as a small one: as many pages as there is room for are of the first tier in any
/// case.
///
/// # Errors
/// [`PolicyError`] for a text that is not `auto`, an option that is not `KEY=VALUE`, or another pass.
pub fn recipe(text: &str, budget: Budget, question: Question) -> Result<String, PolicyError> {
    let (name, options) = text.split_once(':').map_or((text, None), |(name, options)| (name, Some(options)));
    if name.trim() != AUTO {
        return Err(PolicyError::UnknownPolicy { got: name.trim().to_owned() });
    }
    let per_cent = |part: Ratio| 100.0 * part.numerator() as f64 / part.denominator() as f64;
    let share = match budget {
        Budget::Fraction(part) => per_cent(part),
        Budget::Evict(part) => 100.0 - per_cent(part),
        Budget::Bytes(_) | Budget::Pages(_) | Budget::Tokens(_) => 0.0,
    };
    let mut pass = question;
    let mut given: Vec<(&str, &str)> = Vec::new();
    for item in options.into_iter().flat_map(|options| options.split(',')) {
        let (key, value) = item.split_once('=').ok_or_else(|| PolicyError::NotAnOption {
            policy: AUTO,
            got: item.trim().to_owned(),
            known: "pass (none, probe or reconstruct), and those of the policy it stands for".to_owned(),
        })?;
        match (key.trim(), value.trim()) {
            ("pass", "none") => pass = Question::Seen,
            ("pass", "reconstruct") if question == Question::NextTurn => pass = question,
            ("pass", "reconstruct") => pass = Question::Later,
            ("pass", "probe") => pass = Question::Probed,
            ("pass", got) => {
                let expected = "none, probe or reconstruct".to_owned();
                return Err(PolicyError::BadValue { policy: AUTO, key: "pass", expected, got: got.to_owned() });
            }
            item => given.push(item),
        }
    }
    let (policy, mut parts) = match pass {
        Question::Seen => ("page-entro-kv", vec![("preset", "serving"), ("allot", "global")]),
        Question::Probed => ("page-entro-kv", vec![("preset", "serving"), ("allot", "global"), ("rows", "probe")]),
        Question::Later => ("kvzip", vec![("chunk", "1024"), ("window", "32")]),
        Question::NextTurn => ("kvzip", vec![("chunk", "1024")]),
    };
    let (_, tiers) = BY_SHARE.iter().find(|(least, _)| share >= *least).expect("the last is for any share");
    parts.push(("recent", "32tok"));
    if matches!(pass, Question::Later | Question::NextTurn) {
        parts.push(("pack", "score"));
    }
    parts.push(("tiers", tiers));
    if question == Question::NextTurn {
        // A part of a conversation that has only begun is too little to hold what was said in it.
        let is_part = matches!(budget, Budget::Fraction(_) | Budget::Evict(_));
        parts.push(("schedule", if is_part { "after_answer:512" } else { "after_answer" }));
    }
    for (key, value) in given {
        match parts.iter_mut().find(|(known, _)| *known == key) {
            Some(part) => part.1 = value,
            None => parts.push((key, value)),
        }
    }
    let parts: Vec<String> = parts.into_iter().map(|(key, value)| format!("{key}={value}")).collect();
    Ok(format!("{policy}:{}", parts.join(",")))
}

/// Whether caches of `shape` that are to be stored as `kind` can be stored in the tiers of every recipe instead: whether tokens are
/// written the same way, and pages can be codes.
#[must_use]
pub fn recipe_fits(shape: &CacheShape, kind: PageKind) -> bool {
    let fits = |tier: PageKind| kind == tier.written_as() && tier.check(shape).is_ok();
    let tiers = BY_SHARE.iter().map(|(_, tiers)| tiers.parse::<Tiers>().expect("tiers of ours are tiers"));
    tiers.into_iter().all(|tiers| tiers.kinds().all(fits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::parse_policy;
    use crate::shape::LayerKind;

    #[test]
    fn the_recipe_follows_the_budget_and_every_part_can_be_replaced() {
        let recipe = |text: &str, budget: &str, question| recipe(text, budget.parse().unwrap(), question).unwrap();
        let (seen, later) = (Question::Seen, Question::Later);
        let kvzip = "kvzip:chunk=1024,window=32,recent=32tok,pack=score";
        assert_eq!(recipe("auto", "50%", later), format!("{kvzip},tiers=q8_0/tq4"));
        assert_eq!(recipe("auto", "20%", later), format!("{kvzip},tiers=q8_0/tq4:3nats+tq3v2"));
        assert_eq!(recipe("auto", "evict:0.95", later), format!("{kvzip},tiers=tq4:3nats+tq3v2"));
        assert_eq!(recipe("auto", "64MiB", later), format!("{kvzip},tiers=tq4:3nats+tq3v2"));
        let entro = "page-entro-kv:preset=serving,allot=global,recent=32tok";
        assert_eq!(recipe("auto", "1/5", seen), format!("{entro},tiers=q8_0/tq4:3nats+tq3v2"));
        assert_eq!(recipe("auto:pass=none", "1/5", later), format!("{entro},tiers=q8_0/tq4:3nats+tq3v2"));
        let replaced = recipe("auto:pass=reconstruct,tiers=tq3,weight=0.5", "10%", seen);
        assert_eq!(replaced, "kvzip:chunk=1024,window=32,recent=32tok,pack=score,tiers=tq3,weight=0.5");
        let turns = Question::NextTurn;
        let of_turns = "kvzip:chunk=1024,recent=32tok,pack=score,tiers=q8_0/tq4:3nats+tq4/tq2";
        assert_eq!(recipe("auto", "10%", turns), format!("{of_turns},schedule=after_answer:512"));
        assert_eq!(recipe("auto:pass=reconstruct,schedule=once", "10%", turns), format!("{of_turns},schedule=once"));
        assert!(recipe("auto:pass=none", "100tok", turns).ends_with(",schedule=after_answer"));
        for budget in ["40%", "20%", "5%", "100tok"] {
            for question in [seen, later, turns, Question::Probed] {
                parse_policy(&recipe("auto", budget, question)).unwrap();
            }
        }
    }

    #[test]
    fn it_fits_plain_caches_of_pages_that_can_be_codes() {
        let fits = |head_dim, page_size, kind: &str| {
            let shape = CacheShape::new(vec![LayerKind::Global; 2], 2, 2, head_dim, page_size).unwrap();
            recipe_fits(&shape, kind.parse().unwrap())
        };
        assert!(fits(64, 16, "f16") && fits(96, 48, "f16") && fits(128, 32, "f16"));
        for (head_dim, page_size, kind) in
            [(64, 16, "f32"), (64, 16, "tq4"), (64, 16, "q8_0"), (80, 16, "f16"), (64, 8, "f16")]
        {
            assert!(!fits(head_dim, page_size, kind), "{head_dim}, {page_size}, {kind}");
        }
    }

    #[test]
    fn what_is_no_recipe_is_refused() {
        assert!(recipe("auto:pass=probe", "5%".parse().unwrap(), Question::Seen).unwrap().contains("rows=probe"));
        let refused = |text: &str| recipe(text, "10%".parse().unwrap(), Question::Seen).unwrap_err().to_string();
        assert_eq!(refused("auto:pass=twice"), "option `pass` of auto is none, probe or reconstruct, got `twice`");
        assert_eq!(
            refused("auto:packed"),
            "an option of auto is KEY=VALUE, got `packed`; known are pass (none, probe or reconstruct), and those of the policy it \
             stands for"
        );
        assert!(refused("automatic").starts_with("unknown policy `automatic`"));
    }
}
