//! `entrokv policies`: what `--policy` knows.

use clap::Args;
use clap::builder::FalseyValueParser;
use entrokv::{EvictionPolicy, LeastBudget, POLICIES, Reading};
use serde::Serialize;

use crate::failure::Failure;
use crate::output;

const EXAMPLES: &str = "\
Examples:
  entrokv policies
  entrokv generate -m smollm2-135m --prompt-file book.txt --kv-budget 20% --policy snapkv:window=64,allot=global";

/// Tokens a page, by default.
const PAGE_SIZE: usize = 16;

/// How to print them.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct PoliciesArgs {
    /// Print one JSON array
    #[arg(long, env = "ENTROKV_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    paper: &'static str,
    /// What it reads with its defaults.
    needs: Vec<&'static str>,
    frees: bool,
    requires_file: bool,
    /// Smallest budget as a fraction; `null` where it is a number of pages, whatever the prompt: a fraction below those is raised.
    min_budget: Option<f64>,
    /// Smallest budget in pages of 16 tokens a KV head, its defaults' pins; `null` where it is a fraction.
    min_pages: Option<usize>,
}

/// What a policy is shown or kept for it, in words.
fn needs(policy: &dyn EvictionPolicy) -> Vec<&'static str> {
    let reads = (policy.reading() != Reading::All).then_some(["queries", "key ranges"]);
    let channels = policy.key_channels().map(|_| ["window queries", "keys"]);
    policy.needs().words().into_iter().chain(reads.into_iter().chain(channels).flatten()).collect()
}

/// Runs the command.
pub(crate) fn run(args: &PoliciesArgs) -> Result<(), Failure> {
    let rows: Vec<Row> = POLICIES
        .iter()
        .map(|entry| {
            let policy = entry.default_policy();
            let (min_budget, min_pages) = match policy.least_budget() {
                LeastBudget::Pins => (None, Some(policy.pins().smallest_pages(PAGE_SIZE))),
                LeastBudget::Everything => (Some(1.0), None),
            };
            Row {
                name: entry.name,
                paper: entry.paper,
                needs: needs(&*policy),
                frees: entry.frees,
                requires_file: entry.requires_file,
                min_budget,
                min_pages,
            }
        })
        .collect();
    if args.json {
        return output::line(serde_json::to_string(&rows)?);
    }
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
    let needs_width = rows.iter().map(|row| row.needs.join(", ").len()).max().unwrap_or(0);
    let mut lines = vec![format!("{:width$}  {:5}  {:needs_width$}  described in", "policy", "frees", "reads")];
    lines.extend(rows.iter().map(|row| {
        let frees = if row.frees { "yes" } else { "no" };
        format!("{:width$}  {frees:5}  {:needs_width$}  {}", row.name, row.needs.join(", "), row.paper)
    }));
    output::line(lines.join("\n"))
}
