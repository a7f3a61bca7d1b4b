//! What is printed: tables as ss(8) and ps(1) print them, aligned columns and no lines; and JSON.

use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};

use comfy_table::presets::NOTHING;
use comfy_table::{ColumnConstraint, ContentArrangement, Row, Table};
use serde::Serialize;

/// Prints rows under a header. On a terminal the last column is wrapped so as to fit; the others are kept whole, since
/// an address or a number in two pieces is of no use.
pub fn print<R: Into<Row>>(header: R, rows: impl IntoIterator<Item = R>) {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(header).add_rows(rows);
    let last = table.column_count() - 1;
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, if index == last { 0 } else { 2 }));
        if index != last {
            column.set_constraint(ColumnConstraint::ContentWidth);
        }
    }
    println!("{}", table.trim_fmt());
}

/// Puts text on standard output, or ends the command.
pub fn say(text: &str) {
    if let Err(error) = anstream::stdout().write_all(text.as_bytes()) {
        if error.kind() != ErrorKind::BrokenPipe {
            eprintln!("ringlet: cannot write: {error}");
        }
        std::process::exit(1);
    }
}

/// Does it show as itself, and nothing else? No control character does, nor what turns the direction of text or can't be seen.
fn is_plain(each: char) -> bool {
    matches!(each, '\'' | '"' | '\\') || each.escape_debug().len() == 1
}

/// Text from another process, with whatever could command a terminal, or deceive who reads it, escaped.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for each in text.chars() {
        match is_plain(each) {
            true => shown.push(each),
            false => shown.extend(each.escape_debug()),
        }
    }
    shown
}

/// Prints JSON that is as harmless to a terminal, and says the same.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    println!("{}", escaped(&serde_json::to_string_pretty(value)?));
    Ok(())
}

/// What is beyond ASCII, or DEL, is within strings.
fn escaped(json: &str) -> String {
    let mut shown = String::with_capacity(json.len());
    for each in json.chars() {
        if each < '\x7f' || is_plain(each) {
            shown.push(each);
            continue;
        }
        for unit in each.encode_utf16(&mut [0; 2]) {
            let _ = write!(shown, "\\u{unit:04x}");
        }
    }
    shown
}

/// 40,312.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let starts_group = |at: usize| at > 0 && (digits.len() - at).is_multiple_of(3);
    let comma = |at| if starts_group(at) { "," } else { "" };
    digits.char_indices().map(|(at, digit)| format!("{}{digit}", comma(at))).collect()
}

/// So many names at most, and how many more there are.
pub fn some_of(names: impl Iterator<Item = String>) -> String {
    const SHOWN_MAX: usize = 8;
    let mut names = names.peekable();
    let shown: Vec<String> = names.by_ref().take(SHOWN_MAX).collect();
    match names.count() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\x1b[2J\x7f\u{9b}\u{202e}\u{2066}\u{e0041}\n\u{2028}é\\\"日";

    #[test]
    fn nothing_commands_a_terminal() {
        let shown = printable(HOSTILE);
        assert!(
            shown.starts_with('a') && shown.ends_with("é\\\"日") && shown.chars().all(is_plain)
        );
        assert!(!is_plain('\u{200b}') && !is_plain('\u{feff}') && is_plain(' '));
    }

    #[test]
    fn json_is_harmless_and_says_the_same() {
        let shown = escaped(&serde_json::to_string_pretty(&[HOSTILE]).unwrap());
        assert!(shown.chars().all(|each| each == '\n' || is_plain(each)), "{shown}");
        assert_eq!(serde_json::from_str::<[String; 1]>(&shown).unwrap(), [HOSTILE]);
    }

    #[test]
    fn long_numbers_are_grouped() {
        let shown = [0, 999, 1_000, 40_312, 1_234_567].map(grouped);
        assert_eq!(shown, ["0", "999", "1,000", "40,312", "1,234,567"]);
    }

    #[test]
    fn long_lists_are_cut() {
        assert_eq!(some_of((0..2).map(|n| n.to_string())), "0, 1");
        assert!(some_of((0..100).map(|n| n.to_string())).ends_with("7 and 92 more"));
    }
}
