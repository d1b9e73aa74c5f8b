//! A conversation through a pipe: commands, and a cache that lives from turn to turn.

use crate::program::Bench;

const WORDS: [&str; 4] = ["-n", "12", "--ignore-eos", "--kv-budget"];

/// The numbers of every `/stats` in what a chat printed: tokens of the conversation, and tokens read for the last answer.
fn stats(printed: &str) -> Vec<(usize, usize)> {
    let number = |line: &str| line.split_whitespace().nth(1).unwrap().parse().unwrap();
    let lines = |label: &'static str| printed.lines().filter(move |line| line.starts_with(label)).map(number);
    lines("tokens ").zip(lines("read ")).collect()
}

/// The lines of `/history` in what a chat printed, one a message.
fn history(printed: &str) -> Vec<&str> {
    let is_message = |line: &&str| ["user: ", "assistant: ", "system: "].iter().any(|role| line.starts_with(role));
    printed.lines().filter(is_message).collect()
}

#[test]
fn a_second_question_is_all_that_the_second_turn_reads() {
    let bench = Bench::new();
    let printed =
        bench.run_model("chat", &[&WORDS[..], &["50%"]].concat(), "Who are you?\n/stats\nAnd who else?\n/stats\n");
    let printed = printed.success();
    let stats = stats(&printed);
    let &[(first, first_read), (second, second_read)] = &stats[..] else { panic!("{printed}") };
    assert_eq!(first, first_read + 12);
    // The last token of an answer has not been read when it ends: the next turn reads it before its own.
    assert_eq!(second, first + second_read - 1 + 12);
    assert!(second_read < first + 12, "{stats:?}");
    let budgets: Vec<&str> = printed.lines().filter(|line| line.starts_with("KV held")).collect();
    assert!(budgets.len() == 2 && budgets[0] != budgets[1], "{budgets:?}");
}

#[test]
fn the_conversation_can_be_changed() {
    let bench = Bench::new();
    let script = "/history\nOne?\nTwo?\n/undo\n/history\n/edit Three?\n/history\n";
    let printed = bench.run_model("chat", &[&WORDS[..], &["100%"]].concat(), script).success();
    let history = history(&printed);
    let users: Vec<&str> = history.iter().copied().filter(|line| line.starts_with("user: ")).collect();
    assert_eq!(users, ["user: One?", "user: Three?"], "{printed}");
}

#[test]
fn the_same_question_gets_the_same_answer_again() {
    let bench = Bench::new();
    let words = [&WORDS[..], &["100%"]].concat();
    let once = bench.run_model("chat", &words, "One?\n").success();
    let again = bench.run_model("chat", &words, "One?\n/retry\n").success();
    assert_eq!(again, once.repeat(2));
}

#[test]
fn a_system_message_starts_over_and_stays() {
    let bench = Bench::new();
    let script = "One?\n/system Be brief.\n/history\nTwo?\n/clear\n/history\n/quit\nThree?\n/history\n";
    let printed = bench.run_model("chat", &[&WORDS[..], &["100%"]].concat(), script).success();
    assert_eq!(history(&printed), ["system: Be brief.", "system: Be brief."], "{printed}");
}

#[test]
fn commands_that_cannot_be_followed_say_so_and_the_chat_goes_on() {
    let bench = Bench::new();
    let outcome = bench.run_model("chat", &[], "/retry\n/edit\n/edit x\n/nonsense\n/stats\n/help\n");
    assert_eq!(outcome.code, Some(0));
    let complaints: Vec<&str> = outcome.stderr.lines().collect();
    assert_eq!(complaints.len(), 4, "{complaints:?}");
    assert!(complaints[3].contains("unknown command /nonsense"));
    assert!(outcome.stdout.starts_with("nothing has been said yet\n/help"));
}

#[test]
fn a_conversation_goes_on_past_its_budget() {
    let bench = Bench::new();
    let script = format!("{}/stats\n", "Tell me about the sea and the ships on it, please.\n".repeat(20));
    let printed = bench.run_model("chat", &[&WORDS[..], &["64tok"]].concat(), script).success();
    let (tokens, _) = stats(&printed)[0];
    assert!(tokens > 20 * 60, "{tokens}");
    // 4 pages of 1 KiB in each of 4 KV groups.
    assert!(printed.contains("(budget 0.02 MiB;"), "{printed}");
}
