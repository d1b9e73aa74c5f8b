//! `entrokv policies`: what `--policy` knows.

use clap::Args;
use clap::builder::FalseyValueParser;
use entrokv::{LeastBudget, POLICIES};
use serde::Serialize;

use crate::failure::Failure;
use crate::output;

const EXAMPLES: &str = "\
Examples:
  entrokv policies
  entrokv generate -m smollm2-135m --prompt-file book.txt --kv-budget 20% --policy snapkv:window=64,allot=global";

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
    /// Smallest budget as a fraction; `null` where it is a number of pages, whatever the prompt.
    min_budget: Option<f64>,
}

/// Runs the command.
pub(crate) fn run(args: &PoliciesArgs) -> Result<(), Failure> {
    let rows: Vec<Row> = POLICIES
        .iter()
        .map(|entry| Row {
            name: entry.name,
            paper: entry.paper,
            needs: entry.default_policy().needs().words(),
            frees: entry.frees,
            requires_file: entry.requires_file,
            min_budget: match entry.default_policy().least_budget() {
                LeastBudget::Pins => None,
                LeastBudget::Everything => Some(1.0),
            },
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
