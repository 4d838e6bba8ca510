//! Tables of text with aligned columns.

/// Rows of cells under a head; the first column is aligned left, the others right.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(head: &[&str]) -> Self {
        Self { rows: vec![head.iter().map(|&cell| cell.to_owned()).collect()] }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The lines, without a newline at the end.
    pub(crate) fn render(&self) -> String {
        let n_columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..n_columns).map(width).collect();
        let line = |row: &Vec<String>| {
            let cell = |(column, text): (usize, &String)| match column {
                0 => format!("{text:<width$}", width = widths[0]),
                _ => format!("{text:>width$}", width = widths[column]),
            };
            row.iter().enumerate().map(cell).collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

/// Writes a number with about four significant digits; none is `-`.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        size if size.is_nan() => "-".to_owned(),
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 100.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        0.0 => "0".to_owned(),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["what", "ms"]);
        table.row(vec!["a longer name".to_owned(), number(1.5)]);
        table.row(vec!["b".to_owned(), number(1234.5)]);
        assert_eq!(table.render(), "what             ms\na longer name  1.50\nb              1234");
    }
}
