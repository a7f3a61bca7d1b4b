//! Tables as ss(8) and ps(1) print them: aligned columns and no lines.

use comfy_table::presets::NOTHING;
use comfy_table::{ColumnConstraint, ContentArrangement, Row, Table};

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

/// Text from another process, with whatever could command a terminal made harmless.
pub fn printable(text: &str) -> String {
    text.chars().map(|each| if each.is_control() { '?' } else { each }).collect()
}
