//! Dates for chat templates: the part of C's `strftime` that they use, in UTC and English.

use minijinja::{Error, ErrorKind};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

struct Date {
    year: i64,
    /// 1 to 12.
    month: usize,
    day: i64,
    /// From 0 for the first of January.
    day_of_year: i64,
    /// From 0 for Sunday.
    weekday: usize,
}

/// Formats a moment, given in milliseconds since 1970.
///
/// # Errors
/// A directive that is not known.
pub(super) fn format_utc(format: &str, unix_ms: u64) -> Result<String, Error> {
    let seconds = unix_ms / 1000;
    let date = Date::from_days((seconds / 86_400).cast_signed());
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let (month_name, day_name) = (MONTHS[date.month - 1], DAYS[date.weekday]);
    let hour_of_12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            out.push(char);
            continue;
        }
        let mut directive = chars.next();
        // `%-d` leaves out the padding.
        let is_bare = directive == Some('-');
        if is_bare {
            directive = chars.next();
        }
        let number = |value: i64, width: usize| match is_bare {
            true => value.to_string(),
            false => format!("{value:0width$}"),
        };
        let text = match directive {
            Some('Y') => date.year.to_string(),
            Some('y') => number(date.year % 100, 2),
            Some('m') => number(date.month as i64, 2),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('d') => number(date.day, 2),
            Some('j') => number(date.day_of_year + 1, 3),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('w') => date.weekday.to_string(),
            Some('H') => number(hour.cast_signed(), 2),
            Some('I') => number(hour_of_12.cast_signed(), 2),
            Some('M') => number(minute.cast_signed(), 2),
            Some('S') => number(second.cast_signed(), 2),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('F') => format!("{}-{:02}-{:02}", date.year, date.month, date.day),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let directive = other.map_or_else(String::new, String::from);
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now does not know %{directive}"),
                ));
            }
        };
        out.push_str(&text);
    }
    Ok(out)
}

impl Date {
    /// The Gregorian date, by counting 400-year cycles from a first of March (Hinnant, "chrono-compatible low-level date
    /// algorithms").
    fn from_days(days: i64) -> Self {
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_from_march + 2) / 153;
        let day = day_from_march - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = era * 400 + year_of_era + i64::from(month <= 2);
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let day_of_year = if month > 2 { day_from_march + 59 + i64::from(is_leap) } else { day_from_march - 306 };
        let weekday = (days + 4).rem_euclid(7);
        Self { year, month: month as usize, day, day_of_year, weekday: weekday as usize }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments_are_written_as_c_writes_them() {
        // Checked with `date -u -d @SECONDS`.
        let every = "%Y-%m-%d %y %b %B %a %A %j %H:%M:%S %I %p %-d %-m %F %T %w %%";
        let cases = [
            (0, "1970-01-01 70 Jan January Thu Thursday 001 00:00:00 12 AM 1 1 1970-01-01 00:00:00 4 %"),
            (951_782_399, "2000-02-28 00 Feb February Mon Monday 059 23:59:59 11 PM 28 2 2000-02-28 23:59:59 1 %"),
            (951_782_400, "2000-02-29 00 Feb February Tue Tuesday 060 00:00:00 12 AM 29 2 2000-02-29 00:00:00 2 %"),
            (1_735_646_706, "2024-12-31 24 Dec December Tue Tuesday 366 12:05:06 12 PM 31 12 2024-12-31 12:05:06 2 %"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(format_utc(every, seconds * 1000).unwrap(), expected);
        }
    }

    #[test]
    fn an_unknown_directive_is_an_error() {
        assert!(format_utc("%Q", 0).is_err());
        assert!(format_utc("%", 0).is_err());
    }
}
