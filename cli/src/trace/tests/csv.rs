use super::*;

#[test]
fn azure_lines_become_requests() {
    for format in [None, Some(Format::Azure)] {
        let trace = read(AZURE, format).unwrap();
        assert_eq!(trace.requests.len(), 2);
        assert_eq!(trace.span(), Duration::from_millis(52));
        assert_eq!((trace.requests[1].input_tokens, trace.requests[1].output_tokens), (3180, 8));
    }
}

#[test]
fn azure_columns_stand_in_any_order_quoted_and_with_offsets() {
    let text = "\u{feff}\"Model\",\"GeneratedTokens\",\"timestamp\",\"ContextTokens\"\n\
                \"a, b\",\"7\",\"2024-05-10 00:00:00.009930+00:00\",\"11\"\n";
    let trace = read(text, Some(Format::Azure)).unwrap();
    assert_eq!((trace.requests[0].input_tokens, trace.requests[0].output_tokens), (11, 7));
}

/// The order of columns does not matter, and the error of a missing column names it.
#[test]
fn an_azure_header_is_known_by_any_of_its_columns() {
    let text = "GeneratedTokens,ContextTokens,TIMESTAMP\n7,11,2024-05-10 00:00:00\n";
    assert_eq!(read(text, None).unwrap().requests[0].input_tokens, 11);
    assert_eq!(
        complaint("model,ContextTokens\nx,11\n", None),
        "trace:1: the header has no column TIMESTAMP; its columns are model, ContextTokens (--columns names others)"
    );
    assert!(complaint("7,11\nTIMESTAMP,ContextTokens,GeneratedTokens\n", None).contains("neither"));
}

/// A lone carriage return ends a row; the text after it is not lost.
#[test]
fn a_carriage_return_ends_a_row() {
    for (all, damaged) in [("\r\n", "\r"), ("808,10\r\n\r\n", "808,10\r")] {
        let trace = read(AZURE.replace(all, damaged), None).unwrap();
        assert_eq!(trace, read(AZURE, None).unwrap());
    }
    for quoted in ["\"a\rb\"", "\"a\nb\"", "\"a\"\"b,\""] {
        let text = format!("TIMESTAMP,ContextTokens,GeneratedTokens,x\n5,4,1,{quoted}\n6,0,1,x\n");
        let error = read(&text, None).unwrap_err();
        let line = 3 + u64::from(quoted.contains('\n'));
        assert_eq!(error.to_string(), format!("trace:{line}: ContextTokens is 0, outside 1..=16,777,216"));
    }
}

/// A quote that is not closed must not exhaust the memory.
#[test]
fn an_endless_record_is_refused() {
    let text = format!("TIMESTAMP,ContextTokens,GeneratedTokens\n5,1,\"{}", "line\n".repeat(1 << 20));
    assert!(complaint(text, None).contains("line longer than"));
}

fn with_columns(text: &str, columns: &str) -> Result<Trace, TraceError> {
    let options = ReadOptions { format: Format::Azure, columns: columns.parse().unwrap(), ..usual() };
    Trace::read("trace".into(), text.as_bytes(), &options)
}

#[test]
fn columns_have_other_names() {
    let text = "Timestamp,Model,Request tokens,Response tokens\n5,x,472,18\n45.25,y,1087,230\n";
    let columns = "arrival=Timestamp, input = Request tokens ,output=response TOKENS";
    let trace = with_columns(text, columns).unwrap();
    assert_eq!(trace.span(), Duration::from_millis(40_250));
    assert_eq!((trace.requests[1].input_tokens, trace.requests[1].output_tokens), (1087, 230));
    // An omitted field keeps its usual name.
    let text = AZURE.replace("ContextTokens", "in");
    assert_eq!(with_columns(&text, "input=in").unwrap().requests.len(), 2);
}

#[test]
fn wrong_columns_are_named() {
    let text = "when,how\tmany,out\n5,472,18\n5,-1,18\n";
    let complaint = |columns| with_columns(text, columns).unwrap_err().to_string();
    assert_eq!(
        complaint("arrival=when,input=many,output=out"),
        "trace:1: the header has no column many; its columns are when, how\\tmany, out (--columns names others)"
    );
    assert_eq!(
        complaint("arrival=when,output=out,input=how\tmany"),
        "trace:3: how\tmany is -1, outside 1..=16,777,216"
    );
    for (text, error) in [
        ("", "\"\" is not written as field=NAME"),
        ("arrival", "\"arrival\" is not written as field=NAME"),
        ("arrival=", "\"arrival=\" is not written as field=NAME"),
        ("arrival=a,,", "\"\" is not written as field=NAME"),
        ("tokens=a", "no field is called \"tokens\"; there are arrival, input and output"),
        ("input=a,input=a", "input is named twice"),
    ] {
        assert_eq!(text.parse::<Columns>(), Err(error.to_owned()), "{text}");
    }
}

#[test]
fn bad_azure_lines_are_refused_with_line_and_reason() {
    for (line, reason) in [
        ("2023-11-16 18:17:05,12", "no value for GeneratedTokens: the line has 2 columns"),
        ("2023-11-16 18:1", "timestamp \"2023-11-16 18:1\""),
        ("2023-11-16 18:17:05", "no value for ContextTokens"),
        ("2023-11-16 18:17:05,12,", "no value for GeneratedTokens"),
        ("2023-11-16 18:77:05,12,1", "timestamp"),
        ("yesterday,12,1", "timestamp \"yesterday\""),
        ("nan,12,1", "timestamp \"nan\": outside 0"),
        ("-5,12,1", "timestamp \"-5\": outside 0"),
        ("1e300,12,1", "timestamp \"1e300\": outside 0"),
        ("2300-12-31 00:00:00,12,1", "outside 1677..=2262"),
        ("2023-11-16 18:17:05,-3,1", "ContextTokens is -3"),
        ("2023-11-16 18:17:05,0,1", "ContextTokens is 0"),
        ("2023-11-16 18:17:05,12,16777217", "GeneratedTokens is 16777217"),
        ("2023-11-16 18:17:05,12,1.5", "GeneratedTokens is not a whole number: \"1.5\""),
        ("2023-11-16 18:17:05,99999999999999999999,1", "ContextTokens is not a whole number"),
        ("5,12,1", "timestamp \"5\": a number of seconds after dates"),
        (&",".repeat(100), "more than 64 columns"),
    ] {
        let message = complaint(format!("{AZURE}\n{line}\n"), None);
        assert!(message.starts_with("trace:5: ") && message.contains(reason), "{line} gives {message}");
    }
}

#[test]
fn a_date_after_numbers_of_seconds_is_refused() {
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n5,12,1\n6.5,12,1\n2023-11-16 18:17:05,12,1\n";
    let message = complaint(text, None);
    assert_eq!(message, "trace:4: timestamp \"2023-11-16 18:17:05\": a date after numbers of seconds");
}

#[test]
fn a_column_is_named_once_in_the_header() {
    let twice = AZURE.replacen("ContextTokens", "contexttokens,ContextTokens", 1);
    assert_eq!(complaint(twice, None), "trace:1: the header has the column ContextTokens twice");
}
